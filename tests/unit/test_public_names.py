"""What each package offers by name; a change here is a change for its users."""

import importlib

import pytest

PUBLIC = {
    "bench": ["Aggregate", "Rules", "Stamp", "Stream", "aligned_aggregate"],
    "coordinator": ["CoordinatorError"],
    "lanes": ["LaneError"],
    "lanes.models": ["Model", "load_model"],
    "shared_experts": ["AttachedRegion", "Manifest", "Pack", "SharedExpertsError", "attach"],
}
SERVICES = {
    "expressway.lane.v1.Lane": ["Hello", "Generate", "Cancel", "Watch", "Drain", "Prefixes"],
    "expressway.v1.Expressway": ["Generate", "ListLanes", "GetModel"],
    "expressway.keeper.v1.Keepers": ["Watch", "Start", "Stop", "AddLane", "RemoveLane", "Region"],
    "expressway.hosts.v1.Hosts": ["Join", "Leave"],
    "expressway.admin.v1.Admin": ["Ping", "Drain", "Undrain", "Restart", "Add", "Remove"],
}


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_a_package_offers_exactly_these_names(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package])
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_wire_offers_exactly_these_methods():
    from laneproto.v1 import admin_pb2, hosts_pb2, keeper_pb2, lane_pb2, serve_pb2

    found = {
        service.full_name: [method.name for method in service.methods]
        for file in (lane_pb2, serve_pb2, keeper_pb2, admin_pb2, hosts_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
    }
    assert found == SERVICES
