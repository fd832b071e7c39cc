"""What a cluster as it starts by default shows of itself: to the network, to other users, to clients, in its logs."""

import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from coordinator.config import DEFAULT_GRPC, DEFAULT_HTTP, DEFAULT_PAGE
from laneproto.v1 import serve_pb2, serve_pb2_grpc
from tests.fakes.serving import Served, tiny_pack
from tests.security import processes

CANARY = "canary-7f3a9c51"
AUDIT = """
import os, sys
_log = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
def _hook(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        where = args[1:] if event in ("socket.connect", "socket.sendto") else args  # the first is the socket itself
        os.write(_log, f"{os.getpid()}\\t{event}\\t{where!r}\\n".encode())
sys.addaudithook(_hook)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One lane on a small model; every Python process notes what it connects to."""
    folder = tmp_path_factory.mktemp("security")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(AUDIT)
    audit = {"PYTHONPATH": str(folder / "site"), "AUDIT_LOG": str(folder / "audit")}
    with Served(tiny_pack(folder), "--vram-budget", "1MiB", **audit) as running:
        running.pack, running.audit = folder / "pack", folder / "audit"
        yield running


def post(served, path, body, **headers):
    """(status, headers, text) of a POST; bytes are sent as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{served.ready['http']}{path}", data, {"content-type": "application/json", **headers}
    )
    return answer(request)


def answer(request):
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, dict(response.headers), response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read().decode()


def generate(served, **fields):
    """Events of a gRPC generation, or the error's details."""
    with grpc.insecure_channel(served.grpc) as channel:
        stub = serve_pb2_grpc.ExpresswayStub(channel)
        try:
            return list(stub.Generate(serve_pb2.GenerateRequest(**fields), timeout=60))
        except grpc.RpcError as error:
            return error.details()


def everything(served):
    """Processes of the cluster and what they started."""
    return processes.descendants(served.pids.values())


def test_default_addresses_are_loopback():
    for address in (DEFAULT_HTTP, DEFAULT_GRPC, DEFAULT_PAGE):
        assert processes.is_loopback(address.rpartition(":")[0]), address


def test_every_network_socket_is_loopback(served):
    """Doors and page listen there; no connection leads elsewhere, no datagram socket is open."""
    post(served, "/v1/completions", {"prompt": [5, 6], "max_tokens": 2})
    found = {pid: list(processes.inet_sockets(pid)) for pid in everything(served)}
    listening = [s for sockets in found.values() for s in sockets if s.state == processes.LISTEN]
    assert len(listening) == 2, "http and page; gRPC has a path here"
    for sockets in found.values():
        for one in sockets:
            assert one.kind.startswith("tcp"), one
            assert processes.is_loopback(one.local), one
            assert one.state == processes.LISTEN or processes.is_loopback(one.remote), one


def test_nothing_connects_out(served):
    """By the interpreter's own audit, in every Python process since its first line."""
    assert generate(served, text="hello", max_tokens=2)
    lines = [line.split("\t") for line in served.audit.read_text().splitlines()]
    assert {event for _, event, _ in lines} >= {"socket.connect"}, "the hook works: the lane asks the owner"
    allowed = (f"'{served.run_dir}/", "'127.0.0.1'", "'localhost'", "'::1'")
    assert [line for line in lines if not any(word in line[2] for word in allowed)] == []


@pytest.mark.slow
def test_nothing_connects_out_by_the_kernels_word(served, tmp_path):
    """Every connect and datagram of a whole run, native code included."""
    command = ["strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmmsg", "-o", str(tmp_path / "trace")]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("strace is not here or may not trace")
    argv = [
        sys.executable,
        "-m",
        "coordinator.cli",
        "generate",
        str(served.pack),
        "--prompt",
        "hi",
        "--max-tokens",
        "2",
    ]
    done = subprocess.run([*command, *argv], env=served.env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    trace = (tmp_path / "trace").read_text()
    assert "AF_UNIX" in trace, "the run was traced"
    inet = re.findall(r"sa_family=AF_INET6?.*", trace)
    assert [line for line in inet if not re.search(r'"(127\.[0-9.]+|::1|::ffff:127\.[0-9.]+)"', line)] == []


def test_directories_and_sockets_are_the_users_own(served):
    state = Path(served.env["XDG_STATE_HOME"]) / "expressway" / served.name
    for folder in (served.run_dir, state, state / "log"):
        found = folder.lstat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, os.geteuid()), folder
    entries = list(served.run_dir.iterdir())
    sockets = {path.name for path in entries if stat.S_ISSOCK(path.lstat().st_mode)}
    assert sockets >= {"owner.sock", "lane-0.sock"}
    assert {path.name: oct(path.lstat().st_mode & 0o777) for path in entries if path.lstat().st_mode & 0o077} == {}
    logs = {path.name: path.lstat().st_mode & 0o777 for path in (state / "log").iterdir()}
    assert set(logs.values()) == {0o600}, logs
    assert Path(served.grpc.removeprefix("unix:")).lstat().st_mode & 0o077 == 0


def test_nothing_lies_in_shared_memory_by_name(served):
    """The region is a descriptor, never a name that others could open."""
    for pid in everything(served):
        named = [link for link in processes.open_files(pid) if link.startswith("/dev/shm")]
        mapped = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm" in line]
        assert (named, mapped) == ([], []), pid


OTHER_USER = """
import array, json, os, socket, sys
found = {}
for path in sys.argv[1:]:
    kind = socket.SOCK_SEQPACKET if path.endswith("owner.sock") else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as client:
        client.settimeout(60)
        try:
            client.connect(path)
            client.send(bytes.fromhex("82a17601a477616e74aa64657363726970746f72"))
            data, rights, _, _ = client.recvmsg(1024, 1024)
            found[path] = [data.hex(), len(rights)]
        except OSError as error:
            found[path] = type(error).__name__
print(json.dumps(found))
"""


def as_nobody(*paths):
    """What a process of another user gets from these sockets."""
    argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/env", "python3", "-c", OTHER_USER]
    done = subprocess.run([*argv, *map(str, paths)], capture_output=True, text=True, timeout=60, cwd="/")
    if done.returncode:
        pytest.skip(f"no interpreter for another user: {done.stderr[-200:]}")
    return json.loads(done.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(served):
    sockets = [path for path in served.run_dir.iterdir() if stat.S_ISSOCK(path.lstat().st_mode)]
    assert set(as_nobody(*sockets).values()) == {"PermissionError"}
    # Doors left open do not help at the owner: it asks the kernel who is there.
    opened = [*list(served.run_dir.parents)[:3], served.run_dir, served.run_dir / "owner.sock"]
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in opened}
    try:
        for path in opened:
            path.chmod(modes[path] | 0o077)
        (got,) = as_nobody(served.run_dir / "owner.sock").values()
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert got in ("ConnectionResetError", "BrokenPipeError", ["", 0])
    mine = subprocess.run([sys.executable, "-c", OTHER_USER, served.run_dir / "owner.sock"], capture_output=True)
    ((reply, descriptors),) = json.loads(mine.stdout).values()
    assert (b"ready" in bytes.fromhex(reply), descriptors) == (True, 1), "the same bytes from the owner's own user"


BAD_BODIES = [
    b"{", b"[]", b"\xff", b"", b'{"prompt": 1e999}', b"[" * 3000,
    {"prompt": [5], "max_tokens": -1}, {"prompt": [1 << 40]}, {"prompt": [5], "model": "../../etc/passwd"},
    {"prompt": CANARY, "temperature": "hot"}, {"prompt": CANARY * 100_000}, {"prompt": CANARY, "n": 3},
    {"prompt": CANARY, "stop": [CANARY] * 40}, {"prompt": CANARY, "logit_bias": {CANARY: 1}},
]  # fmt: skip
BAD_CHATS = [
    {"messages": []}, {"messages": [{"role": CANARY, "content": CANARY}]}, {"messages": CANARY},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{CANARY}"}}]}]},
    {"messages": [{"role": "user", "content": CANARY}], "tools": [{"type": CANARY}]},
]  # fmt: skip


def test_errors_show_nothing_of_the_inside(served):
    said = []
    for path, bodies in (("/v1/completions", BAD_BODIES), ("/v1/chat/completions", BAD_CHATS)):
        for body in bodies:
            status, headers, text = post(served, path, body)
            assert 400 <= status < 500, (status, text)
            assert headers["Server"] == "expressway"
            assert json.loads(text)["error"]["code"]
            said.append(text)
    base = f"http://{served.ready['http']}"
    for url in ("/", "/v1/models/x", "/v1/../../etc/passwd", f"/%2e%2e/{CANARY}", "/v1/completions"):
        status, _, text = answer(urllib.request.Request(base + url))
        assert status in (404, 405), (url, status)
        said.append(text)
    said.append(post(served, "/v1/completions", {"prompt": [5]}, **{"x-session-id": CANARY * 100})[2])
    said += [
        str(generate(served, **bad)) for bad in ({}, {"text": CANARY, "max_tokens": 0}, {"text": CANARY, "top_p": 7})
    ]
    inside = [str(Path(__file__).parents[2]), str(served.folder), str(served.pack), "site-packages", "Traceback", ".py",
              ".sock", "127.0.0.1"]  # fmt: skip
    inside += [name for name in {socket.gethostname(), os.uname().nodename} if len(name) > 3]
    assert [(word, text) for text in said for word in [*inside, CANARY] if word in text] == []


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# A length too short, no chunk size, a header and a path that are none: the parser trips over the client's words.
BROKEN_REQUESTS = [
    POST + b"Content-Length: 2\r\n\r\n{}" + CANARY.encode() + b" HTTP/7.7\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n" + CANARY.encode() + b"\r\n",
    POST + b"X: \x01" + CANARY.encode() + b"\r\n\r\n",
    b"GET /\xff" + CANARY.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    CANARY.encode() * 2000,
]  # fmt: skip


def raw(served, data):
    """Bytes to the HTTP port; what comes back."""
    host, _, port = served.ready["http"].rpartition(":")
    answered = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        while piece := connection.recv(65536):
            answered += piece
            if b" 400 " in answered:
                break
    return answered


def test_no_word_of_a_conversation_is_written_down(served):
    """Asked over both doors, whole, streamed, refused and in every place a client can write."""
    chat = {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 3, "stop": [CANARY]}
    assert post(served, "/v1/chat/completions", chat)[0] == 200
    assert post(served, "/v1/completions", {"prompt": CANARY, "max_tokens": 3, "stream": True})[0] == 200
    assert len(generate(served, text=CANARY, max_tokens=3, session=CANARY)) > 1
    post(served, "/v1/completions", {"prompt": CANARY, "temperature": 99, CANARY: CANARY})
    post(served, f"/{CANARY}", {"prompt": CANARY}, **{"x-request-id": CANARY, "x-session-id": CANARY})
    assert isinstance(generate(served, text=CANARY, top_p=7), str)
    for broken in BROKEN_REQUESTS:
        raw(served, broken)
    pieces = {CANARY.encode(), CANARY.encode().hex().encode()}
    places = [served.folder / "stderr", *(p for p in served.folder.rglob("*") if p.is_file())]
    assert any(path.name == "coordinator.log" for path in places)
    for path in places:
        with contextlib.suppress(FileNotFoundError):
            data = path.read_bytes()
            assert not [piece for piece in pieces if piece in data], path
    with urllib.request.urlopen(f"http://{served.ready['page']}/metrics", timeout=60) as page:
        assert CANARY not in page.read().decode()
    assert CANARY not in json.dumps(served.status())


def test_compressed_foreign_and_oversized_bodies_are_refused(served):
    """A page of another origin cannot post without asking; nothing is unpacked; nothing endless is read."""
    assert post(served, "/v1/completions", b"{}", **{"content-type": "text/plain"})[0] == 415
    assert post(served, "/v1/completions", b"{}", **{"content-encoding": "gzip"})[0] == 415
    status, headers, _ = answer(
        urllib.request.Request(f"http://{served.ready['http']}/v1/completions", method="OPTIONS",
                               headers={"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"})
    )  # fmt: skip
    assert status == 403  # other origins are not even told what is allowed
    assert not [name for name in headers if name.lower().startswith("access-control")]
