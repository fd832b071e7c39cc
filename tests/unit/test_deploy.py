"""What `deploy/` says stays true: options of `serve`, names of metrics, time limits, the shape of every file."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from coordinator import limits
from coordinator.cli import cluster
from coordinator.cli.serve import command as serve
from coordinator.errors import CoordinatorError

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "systemd/expressway@.service").read_text()


def unit_values(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)


def accepted(words: list[str]) -> bool:
    """Whether `serve` takes these words; a word with a variable in it stands for any value."""
    serve.make_context("serve", list(words))
    return True


def serve_lines() -> dict[str, list[str]]:
    env = (DEPLOY / "systemd/example.env").read_text()
    example = dict(line.split("=", 1) for line in env.splitlines() if not line.startswith("#"))
    (start,) = unit_values("ExecStart")
    start = start.replace("${PACK}", example["PACK"]).replace("$OPTIONS", example["OPTIONS"]).replace("%i", "main")
    compose = yaml.safe_load((DEPLOY / "container/compose.yaml").read_text())["services"]["expressway"]["command"]
    compose = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in compose]
    image = re.search(r"^CMD (\[.*\])$", (DEPLOY / "container/Containerfile").read_text(), re.MULTILINE)
    job = yaml.safe_load((DEPLOY / "kuberay/rayjob.yaml").read_text())["spec"]["entrypoint"]
    return {
        "unit": shlex.split(start)[1:],
        "compose": compose,
        "image": json.loads(image[1]),
        "rayjob": ["serve", "/pack", *(word for part in job.split(" -- ")[1:] for word in shlex.split(part))],
    }


@pytest.mark.parametrize("where", ["unit", "compose", "image", "rayjob"])
def test_serve_takes_every_option(where):
    words = serve_lines()[where]
    assert words[0] == "serve"
    assert accepted(words[1:])


def test_every_host_of_the_job_takes_the_options_of_all():
    job = yaml.safe_load((DEPLOY / "kuberay/rayjob.yaml").read_text())["spec"]["entrypoint"]
    words = ["/pack", "--head", "10.0.0.1:7443", "--listen", "10.0.0.2:7444", "--suffix", "10-0-0-2"]
    cluster.join.make_context("join", [*words, *shlex.split(job.split(" -- ")[1])])


def test_the_pods_secrets_and_labels_meet():
    job = yaml.safe_load((DEPLOY / "kuberay/rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    service, budget = list(yaml.safe_load_all((DEPLOY / "kuberay/proxy.yaml").read_text()))[1:]
    groups = {"head": job["headGroupSpec"], "host": job["workerGroupSpecs"][0]}
    labels = {name: group["template"]["metadata"]["labels"] for name, group in groups.items()}
    assert {name: each["part"] for name, each in labels.items()} == {"head": "head", "host": "host"}
    assert service["spec"]["selector"] == labels["head"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels["head"].items() & labels["host"].items()
    for name, group in groups.items():
        pod = group["template"]["spec"]
        made = {volume["name"] for volume in pod["volumes"]}
        mounted = {
            mount["name"] for each in (*pod["containers"], *pod["initContainers"]) for mount in each["volumeMounts"]
        }
        assert made == mounted
        secret = next(volume["secret"]["secretName"] for volume in pod["volumes"] if volume["name"] == "hosts")
        assert secret == f"expressway-{name}"
        assert {"name": "XDG_CONFIG_HOME", "value": "/var/lib/expressway/config"} in pod["containers"][0]["env"]


def test_an_option_that_does_not_exist_would_be_found():
    import click

    with pytest.raises(click.UsageError):
        accepted([*serve_lines()["unit"][1:], "--no-such-option"])


def test_whoever_stops_a_cluster_waits_long_enough():
    drain = float(re.search(r"--drain (\d+)", (DEPLOY / "systemd/example.env").read_text())[1])
    for drain_s in (drain, 10.0):
        longest = drain_s + limits.COORDINATOR_STOP_S + limits.LANE_STOP_S + limits.OWNER_STOP_S
        assert float(unit_values("TimeoutStopSec")[0]) > longest
    compose = yaml.safe_load((DEPLOY / "container/compose.yaml").read_text())["services"]["expressway"]
    assert compose["stop_grace_period"] == "90s"
    job = yaml.safe_load((DEPLOY / "kuberay/rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] == 90


def test_the_unit_is_hardened():
    for key, value in {
        "NoNewPrivileges": "yes", "CapabilityBoundingSet": "", "ProtectSystem": "strict", "ProtectHome": "yes",
        "PrivateTmp": "yes", "PrivateDevices": "yes", "RestrictNamespaces": "yes", "UMask": "0077",
        "RuntimeDirectoryMode": "0700", "StateDirectoryMode": "0700", "OOMPolicy": "continue", "KillMode": "mixed",
        "IPAddressDeny": "any", "IPAddressAllow": "localhost",
    }.items():  # fmt: skip
        assert unit_values(key) == [value], key
    assert "LimitMEMLOCK" not in UNIT  # only where something is pinned
    assert "LimitMEMLOCK=infinity" in (DEPLOY / "systemd/gpu.conf").read_text()


def documented_metrics() -> set[str]:
    rows = re.findall(r"^\| `(expressway_\w+)(?:\{[^`]*)?` \| (\w+)", (ROOT / "docs/metrics.md").read_text(), re.M)
    assert len(rows) > 30
    names = {name for name, _ in rows}
    return names | {
        f"{name}_{part}" for name, kind in rows if kind == "histogram" for part in ("bucket", "sum", "count")
    }


def expressions() -> dict[str, str]:
    board = json.loads((DEPLOY / "grafana/expressway.json").read_text())
    found = {f"panel {p['title']}": t["expr"] for p in board["panels"] for t in p["targets"]}
    found |= {"variable " + v["name"]: str(v["query"]) for v in board["templating"]["list"]}
    for group in yaml.safe_load((DEPLOY / "prometheus/expressway.rules.yml").read_text())["groups"]:
        found |= {f"alert {rule['alert']}": rule["expr"] for rule in group["rules"]}
    return found


def test_every_metric_exists():
    known = documented_metrics()
    used = {where: set(re.findall(r"\bexpressway_\w+", text)) for where, text in expressions().items()}
    assert sum(map(len, used.values())) > 20
    assert {where: names - known for where, names in used.items() if names - known} == {}


def test_states_and_outcomes_of_the_alerts_exist():
    from coordinator.telemetry.metrics_state import LANE_STATES

    for text in expressions().values():
        for states in re.findall(r'state=~?"([^"]+)"', text):
            assert set(states.split("|")) <= set(LANE_STATES), states
    codes = {kind.code for kind in error_kinds(CoordinatorError)}
    for text in expressions().values():
        for outcomes in re.findall(r'outcome=~?"([^"]+)"', text):
            for pattern in outcomes.split("|"):
                assert any(re.fullmatch(pattern, code) for code in codes), pattern


def error_kinds(kind: type[CoordinatorError]) -> set[type[CoordinatorError]]:
    return {kind}.union(*(error_kinds(each) for each in kind.__subclasses__()))


def test_panels_do_not_lie_on_each_other():
    board = json.loads((DEPLOY / "grafana/expressway.json").read_text())
    taken = [
        (p["gridPos"]["x"] + dx, p["gridPos"]["y"] + dy)
        for p in board["panels"]
        for dx in range(p["gridPos"]["w"])
        for dy in range(p["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])


def test_every_alert_is_explained():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    alerts = [name.removeprefix("alert ") for name in expressions() if name.startswith("alert ")]
    assert [alert for alert in alerts if alert not in page] == []


def test_the_proxy_reads_session_headers_of_the_doors():
    page = (ROOT / "docs/api.md").read_text()
    used = set(re.findall(r"\$http_(\w+)", (DEPLOY / "proxy/nginx.conf").read_text())) - {"authorization"}
    assert len(used) == 4
    assert [name for name in used if f"`{name.replace('_', '-')}`" not in page] == []


@pytest.mark.parametrize("file", ["proxy/nginx.conf", "kuberay/proxy.yaml"])
def test_a_proxy_in_front_of_a_server_without_keys_opens_nothing(file):
    """Doors without keys refuse other hosts' names, and ask for a key otherwise: both must reach them as sent."""
    text = (DEPLOY / file).read_text()
    answering = text[text.index("location /v1/") :].split("}")[0]
    assert "proxy_set_header Host $host;" in answering
    assert "Authorization" not in answering
    assert "proxy_buffering off;" in answering


def test_pods_give_nothing_away():
    spec = yaml.safe_load((DEPLOY / "kuberay/rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            if container["name"].startswith("ray-"):
                assert {"name": "RAY_memory_monitor_refresh_ms", "value": "0"} in container["env"]
    assert spec["authOptions"] == {"mode": "token"}


def test_the_ray_cluster_file_keeps_the_schema_of_ray():
    jsonschema = pytest.importorskip("jsonschema")
    import importlib.util

    folder = Path(importlib.util.find_spec("ray").origin).parent
    schema = json.loads((folder / "autoscaler/ray-schema.json").read_text())
    cluster = yaml.safe_load((DEPLOY / "ray/cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    for line in (*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"]):
        assert "ray start" not in line or "RAY_memory_monitor_refresh_ms=0" in line


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_reads_the_unit(tmp_path):
    unit = tmp_path / "expressway@main.service"
    unit.write_text(UNIT.replace("/opt/expressway/current/bin/expressway", "/bin/true"))
    (tmp_path / "expressway@main.service.d").mkdir()
    for drop_in in ("", (DEPLOY / "systemd/gpu.conf").read_text()):
        (tmp_path / "expressway@main.service.d/gpu.conf").write_text(drop_in)
        done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here (Debian: prometheus)")
def test_promtool_runs_the_rules():
    for words in (["check", "config", "prometheus.yml"], ["test", "rules", "expressway.test.yml"]):
        done = subprocess.run(
            ["promtool", *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
