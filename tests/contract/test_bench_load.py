"""The load driver against a server of a few lines that speaks the OpenAI protocol, and what it makes of its answers."""

import asyncio
import json
import time

import aiohttp
import pytest
from aiohttp import web

from bench.__main__ import run_main
from bench.load import drive
from bench.load.door import Server, served_model
from bench.load.workloads import WORKLOADS

GAP_S = 0.002


class Fake:
    """Streams `tokens` pieces; keeps every body and session; can refuse, break or count wrongly."""

    def __init__(self, *, status=200, cut=False, per_piece=1, error=None):
        self.status, self.cut, self.per_piece, self.error = status, cut, per_piece, error
        self.bodies, self.sessions, self.keys, self.running, self.most = [], [], [], 0, 0

    async def models(self, request):
        if self.status != 200:
            return web.json_response({"error": {"code": "unauthorized"}}, status=self.status)
        return web.json_response({"data": [{"id": "fake"}]})

    async def chat(self, request):
        self.bodies.append(body := await request.json())
        self.sessions.append(request.headers["x-session-id"])
        self.keys.append(request.headers.get("authorization"))
        if self.status != 200:
            return web.json_response({"error": {"code": "queue_full", "message": "no"}}, status=self.status)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._stream(request, body)
        finally:
            self.running -= 1

    async def _stream(self, request, body):
        response = web.StreamResponse()
        await response.prepare(request)

        async def send(event):
            await response.write(
                b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
            )

        await response.write(b": a comment\n\n")
        await send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        pieces = max(1, body["max_tokens"] // self.per_piece)
        for k in range(pieces):
            await asyncio.sleep(GAP_S)
            await send({"choices": [{"delta": {"content": f"w{k} "}, "finish_reason": None}]})
            if self.cut and k == 1:
                request.transport.close()
                return response
        if self.error:
            await send({"error": {"code": self.error, "message": "x"}})
            return response
        counters = {"expert_hits": 3, "expert_misses": 1, "expert_hit_bytes": 30, "expert_miss_bytes": 10}
        lane = f"lane-{hash(self.sessions[-1]) % 2}"
        await send(
            {"choices": [{"delta": {}, "finish_reason": "length"}], "expressway": {"lane": lane, "counters": counters}}
        )
        usage = {
            "prompt_tokens": 11,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        await send({"choices": [], "usage": usage})
        await send(b"[DONE]")
        return response


@pytest.fixture
async def served():
    runners = []

    async def serve(fake):
        app = web.Application()
        app.router.add_get("/v1/models", fake.models)
        app.router.add_post("/v1/chat/completions", fake.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    yield serve
    for runner in runners:
        await runner.cleanup()


async def one(url, max_tokens=8, timeout_s=60.0, key=None):
    server = Server(url, "fake", key)
    async with server.client() as client:
        messages = [{"role": "user", "content": "x"}]
        return await server.ask(client, messages, key="k", session="s", max_tokens=max_tokens, timeout_s=timeout_s)


async def test_an_answer_is_read_with_its_times_tokens_lane_and_counters(served):
    fake = Fake()
    reply = await one(await served(fake), key="secret")
    assert (reply.error, reply.tokens, reply.prompt_tokens, reply.cached_tokens) == (None, 8, 11, 4)
    assert reply.lane in ("lane-0", "lane-1")
    assert reply.counters["expert_hits"] == 3
    assert reply.text == "".join(f"w{k} " for k in range(8))
    assert len(reply.gaps_s) == 7
    assert reply.begin_s < reply.pieces[0][0] <= reply.pieces[-1][0] <= reply.end_s
    assert fake.keys == ["Bearer secret"]
    assert fake.bodies[0]["ignore_eos"] is True


async def test_tokens_that_come_together_are_spread_over_the_pieces(served):
    reply = await one(await served(Fake(per_piece=3)), max_tokens=10)
    assert [tokens for _, tokens in reply.pieces] == [3, 3, 4]
    assert len(reply.gaps_s) == 7  # of the tokens after the first piece


@pytest.mark.parametrize(
    ("fake", "error"),
    [(Fake(status=429), "queue_full"), (Fake(cut=True), None), (Fake(error="lane_lost"), "lane_lost")],
)
async def test_what_goes_wrong_is_a_reply_with_an_error(served, fake, error):
    reply = await one(await served(fake))
    assert reply.error == error if error else reply.error


async def test_nobody_there_and_too_late():
    assert (await one("http://127.0.0.1:1/v1")).error == "ClientConnectorError"


async def test_a_timeout_is_an_error(served):
    reply = await one(await served(Fake()), max_tokens=100_000, timeout_s=2.0)
    assert reply.error == "TimeoutError"
    assert reply.tokens > 0


def work(url, workload="code", scale=0.02, nonce="n"):
    return drive.Work(Server(url, "fake"), WORKLOADS[workload], scale, 1, nonce, 60.0)


async def test_a_closed_loop_keeps_that_many_requests_and_no_more(served):
    fake = Fake()
    replies = await drive.closed_loop(work(await served(fake)), 3, 0.5)
    assert fake.most == 3
    assert {reply.error for reply in replies} == {None}
    assert len({reply.key for reply in replies}) == len(replies) > 3
    assert len(set(fake.sessions)) == 3  # one an agent
    systems = {body["messages"][0]["content"] for body in fake.bodies}
    assert len(systems) == 1
    assert systems.pop().startswith("[n] ")


async def test_an_agent_sends_its_conversation_back_and_waits_for_its_tool(served):
    fake = Fake()
    began = time.monotonic()
    url = await served(fake)
    async with Server(url, "fake").client() as client:
        agent = drive.Agent(work(url, "repository-fix"), client, 0)
        await agent.conversation(0, lambda: True)
    pauses = sum(turn.pause_s for turn in WORKLOADS["repository-fix"].turns[:-1]) * 0.02
    assert time.monotonic() - began >= pauses
    first, second, third = fake.bodies
    assert [message["role"] for message in third["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert third["messages"][: len(second["messages"])] == second["messages"]
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2]["content"] == agent.replies[0].text


async def test_branches_run_beside_each_other_in_sessions_of_their_own(served):
    fake = Fake()
    url = await served(fake)
    async with Server(url, "fake").client() as client:
        agent = drive.Agent(work(url, "repository-agents", 0.005), client, 0)
        await agent.conversation(0, lambda: True)
    assert len(set(fake.sessions)) == 4
    assert fake.most == 3
    assert len(agent.replies) == 1 + 3 * 8


async def test_the_victim_is_asked_the_same_alone_and_beside_others(served):
    seen = await drive.interference(work(await served(Fake()), scale=0.01), 3, 2)
    assert sorted(seen) == [0, 1, 2]
    keys = [[reply.key for reply in seen[count]] for count in seen]
    assert sorted(keys[0]) == sorted(keys[1]) == sorted(keys[2])
    assert len(keys[0]) == 3


async def run_bench(url, tmp_path, *words):
    return await asyncio.to_thread(run_main, ["run", "--url", url, "--scale", "0.01", "--warm-up", "0", *words])


async def test_reports_are_written_compared_with_themselves_and_refused_when_unlike(served, tmp_path, capsys):
    url = await served(Fake())
    a, b, c = (str(tmp_path / f"{name}.json") for name in "abc")
    loop = ["--scenario", "interference", "--rounds", "6", "--concurrency", "1"]
    assert await run_bench(url, tmp_path, *loop, "--out", a) == 0
    shown = capsys.readouterr().out
    assert "| alone |" in shown
    assert "| +1 |" in shown
    assert "tokens/s | window" not in shown  # parts that took turns have no rate of their own
    assert await run_bench(url, tmp_path, *loop, "--out", b, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["conditions"]["workload_digest"]
    assert str(tmp_path) not in json.dumps(report)
    assert run_main(["show", b]) == 0
    assert "| +1 |" in capsys.readouterr().out
    assert run_main(["show", b, "--json", "--plots", str(tmp_path / "plots")]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == ["alone.png", "plus-1.png"]
    assert run_main(["compare", a, b]) == 0
    assert "between tokens" in capsys.readouterr().out
    assert run_main(["compare", a, a, "--json"]) == 0
    for found in json.loads(capsys.readouterr().out).values():
        assert {(each["ratio"], *each["interval"]) for each in found} == {(1.0, 1.0, 1.0)}
    assert await run_bench(url, tmp_path, *loop, "--seed", "2", "--out", c) == 0
    capsys.readouterr()
    assert run_main(["compare", a, c, "--json"]) == 1
    refused = capsys.readouterr()
    assert json.loads(refused.out)["error"]["code"] == "unlike_runs"
    assert "seed: 1 and 2" in refused.err


async def test_an_open_loop_and_a_short_question_behind_a_long_prompt(served, tmp_path, capsys):
    url = await served(Fake())
    assert await run_bench(url, tmp_path, "--scenario", "open", "--rate", "5", "--seconds", "1", "--json") == 0
    figures = json.loads(capsys.readouterr().out)["runs"]["open"]["figures"]
    assert figures["requests"] == len(drive.arrivals_s(5.0, 1.0, 1)) > 0
    assert figures["errors"] == {}
    assert figures["experts"]["hit_rate"] == 0.75
    words = ["--scenario", "long-short", "--workload", "review", "--rounds", "1", "--json"]
    assert await run_bench(url, tmp_path, *words) == 0
    assert set(json.loads(capsys.readouterr().out)["runs"]) == {"alone", "behind", "long"}


async def test_a_server_that_wants_another_key_says_so(served, tmp_path, capsys):
    assert await run_bench(await served(Fake(status=401)), tmp_path) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("/models: unauthorized; it wants a key (--key-variable)")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [(["run"], 2, "usage"), (["run", "--url", "http://127.0.0.1:1/v1"], 1, "unreachable"),
     (["run", "--url", "x", "--concurrency", "0"], 2, "usage"),
     (["run", "--url", "x", "--concurrency", "1,,2"], 2, "usage"),
     (["compare", __file__, __file__], 1, "bad_report"),
     (["show", __file__], 1, "bad_report"), (["nothing"], 2, "usage")],
)  # fmt: skip
def test_failures_have_the_shape_of_all_commands(capsys, words, code, said):
    assert run_main(words) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {said}: ")


async def test_a_server_that_closes_the_connection_may_want_tls():
    async def close(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as server, aiohttp.ClientSession() as client:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(OSError, match=r"ServerDisconnectedError.*TLS only"):
            await served_model(client, Server(f"http://127.0.0.1:{port}/v1", ""))
