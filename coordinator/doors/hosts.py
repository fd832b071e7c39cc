"""The door for hosts: `hosts.proto` over TCP with mutual TLS.

Not here: what a host that is there means (fleet.hosts). Invariants: a caller is who its certificate says, whatever it
sends, unless that was revoked; a host joins only with the same version, pack and options of lanes, and learns of a
refusal with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import grpc
import grpc.aio
import structlog

from coordinator import limits
from coordinator.config import Address
from coordinator.doors.rich_error import abort
from coordinator.errors import BadAddress, BadIdentity, CoordinatorError, OperationFailed
from coordinator.fleet.hosts import Hosts
from coordinator.grpc_server import start_server
from coordinator.host.identity import HEAD, Identity, check_host, host_name
from coordinator.host.revoked import REVOKED, Revoked
from laneproto.v1 import hosts_pb2, hosts_pb2_grpc

PROTOCOL_VERSION = 1
INCARNATION_BYTES = 16

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Served:
    """What a host must have, too."""

    version: str
    fingerprint: bytes
    alike: Mapping[str, str] = field(default_factory=dict)  # options of its lanes, as `LaneOptions.alike` has them

    @classmethod
    def of(cls, fingerprint: bytes, alike: Mapping[str, str] | None = None) -> Served:
        """With the version of this program."""
        return cls(importlib.metadata.version("expressway"), fingerprint, alike or {})


class HostService(hosts_pb2_grpc.HostsServicer):
    """The service on one `Hosts`; `running` says how many requests a lane has."""

    def __init__(self, hosts: Hosts, served: Served, running: Callable[[str], int], revoked: Revoked) -> None:
        self._hosts, self._served, self._running, self._revoked = hosts, served, running, revoked

    async def Join(self, request: hosts_pb2.JoinRequest, context: grpc.aio.ServicerContext) -> hosts_pb2.JoinReply:
        """It is there."""
        try:
            name = await self._caller(context, request)
            self._check(request)
            lanes = await self._hosts.join(name, request.address, request.incarnation)
        except CoordinatorError as error:
            await abort(context, error)
        return hosts_pb2.JoinReply(
            name=name, lanes=len(lanes), lanes_ready=sum(lane.state == "ready" for lane in lanes)
        )

    async def Leave(self, request: hosts_pb2.LeaveRequest, context: grpc.aio.ServicerContext) -> hosts_pb2.LeaveReply:
        """It goes, as soon as nothing runs there, or its patience is over."""
        try:
            name = await self._caller(context, request)
        except CoordinatorError as error:
            await abort(context, error)
        if self._hosts.draining(name, request.incarnation):
            log.info("host leaves", host=name)
            try:
                while any(self._running(lane.name) for lane in self._hosts.lanes_of(name)):  # noqa: ASYNC110
                    await asyncio.sleep(limits.OPERATION_LOOK_S)
            finally:
                await self._hosts.forget(name)
        return hosts_pb2.LeaveReply()

    async def _caller(
        self, context: grpc.aio.ServicerContext, request: hosts_pb2.JoinRequest | hosts_pb2.LeaveRequest
    ) -> str:
        """The name in the certificate, and the suffix; the handshake has checked whose certificate it is."""
        shown = context.auth_context()
        names, certificates = shown.get("x509_common_name", []), shown.get("x509_pem_cert", [])
        name = names[0].decode("ascii", "replace") if len(names) == 1 else ""
        if check_host(name) == HEAD:
            raise BadIdentity("the coordinator's own certificate is for no other host")
        name = host_name(name, request.suffix)
        try:
            self._revoked.check(ssl.PEM_cert_to_DER_cert(certificates[0].decode("ascii")))
        except BadIdentity:
            if self._hosts.draining(name, request.incarnation):  # no other supervisor that has the name by now
                await self._hosts.forget(name)
            raise
        return name

    def _check(self, request: hosts_pb2.JoinRequest) -> None:
        if request.protocol_version != PROTOCOL_VERSION or request.version != self._served.version:
            raise OperationFailed(f"another version: {request.version[:64]!r} here, {self._served.version!r} there")
        if request.fingerprint != self._served.fingerprint:
            raise OperationFailed("another pack: its fingerprint is not that of the coordinator's")
        for option in sorted({*request.alike, *self._served.alike}):
            here, there = request.alike.get(option, "nothing"), self._served.alike.get(option, "nothing")
            if here != there:
                raise OperationFailed(
                    f"other lanes: {option[:64]} is {here[:64]!r} here and {there!r} there; "
                    "what a conversation is told must not depend on its lane"
                )
        if len(request.incarnation) != INCARNATION_BYTES:
            raise OperationFailed("no incarnation")
        address = Address.parse(request.address, anywhere=True)
        if address.path or not address.port:
            raise BadAddress(f"{request.address[:64]!r}: expected HOST:PORT")


@contextlib.asynccontextmanager
async def host_door(
    hosts: Hosts, served: Served, running: Callable[[str], int], identity: Identity, address: Address
) -> AsyncIterator[Address]:
    """The door, open; where. `BadAddress` when it cannot be."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", limits.JOIN_BYTES), ("grpc.so_reuseport", 0)],
        maximum_concurrent_rpcs=2 * limits.HOSTS,
    )
    service = HostService(hosts, served, running, Revoked(identity.path.parent / REVOKED))
    hosts_pb2_grpc.add_HostsServicer_to_server(service, server)
    try:
        port = server.add_secure_port(str(address), identity.server_credentials())
    except RuntimeError as error:
        raise BadAddress(f"{address}: cannot listen there") from error
    await start_server(server)
    try:
        yield Address(host=address.host, port=port)
    finally:
        await server.stop(None)
