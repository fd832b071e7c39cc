"""The bounds table, whole: every name in a `limits.py` is tested at its value and one past it, or says why not.

AT: what is done with an amount; the test does it with the limit, which is accepted, and with the next one, which is
refused. HELD: the same for bounds too large to fill: what has this amount is read with the limit set to the amount and
refused with the limit one below it. ELSEWHERE: a test that needs more than a function call. NO_BOUND: values that
refuse nothing. A new name in none of these fails.
"""

import ast
import json
import math
import shutil
from pathlib import Path

import pytest

from coordinator import limits as door
from coordinator.apis.json_body import parse_json
from coordinator.apis.openai.chat import parse_chat
from coordinator.errors import CoordinatorError
from coordinator.fleet.lane_view import ModelView
from coordinator.generation_config import GenerationConfig
from coordinator.policy.fair_queue import FairQueue, Ticket
from coordinator.policy.shares import Shares
from coordinator.request import Draft, check
from coordinator.sampling import Defaults, Wanted
from coordinator.tenants import ANYONE, Priority, Tenant, Tenants, hash_key
from laneproto.v1 import lane_pb2
from lanes import config as lane_config
from lanes import limits as lane
from lanes.errors import LaneError
from lanes.request import Bounds, parse
from shared_experts import limits as files
from shared_experts import manifest
from shared_experts.checkpoint import INDEX, Checkpoint
from shared_experts.convert import convert
from shared_experts.errors import PackError, SharedExpertsError
from shared_experts.fields import plain, plain_name
from shared_experts.qwen4_exp import TextConfig
from tests.fakes.checkpoints import read_header, small_checkpoint, write_header

ROOT = Path(__file__).parents[2]
TABLES = {"coordinator": door, "lanes": lane, "shared_experts": files}
REFUSALS = (CoordinatorError, LaneError, SharedExpertsError)
MODEL = ModelView("m", "a", b"", 1 << 20, 1 << 20, (), "f32", 0, 1 << 20)
BOUNDS = Bounds(1 << 20, 1 << 20)


def asked(**fields):
    """A request at a door."""
    wanted = {name: fields.pop(name) for name in Wanted.__slots__ if name in fields}
    draft = Draft((1, 2), "prompt", 7, Defaults(0.5), Wanted(**wanted), **fields)
    return check(draft, request_id="r", model=MODEL)


def sent(sampling=None, **fields):
    """A request at a lane."""
    message = {"request_id": "r", "prompt_ids": [1], "max_tokens": 4, **fields}
    return parse(lane_pb2.GenerateRequest(**message, sampling=lane_pb2.Sampling(**sampling or {})), BOUNDS)


def started(*options):
    """A lane's command line."""
    least = ("--owner", "o", "--pack", "p", "--listen", "unix:l", "--vram-budget", "0")
    return lane_config.parse([*least, *options], {}, frozenset({0}))


HELLO = {"role": "user", "content": "hello"}


def tool(name):
    return {"type": "function", "function": {"name": name}}


def no_ids_left(found):
    if not found.end_ids:
        raise CoordinatorError("ignored")


def tenants(content):
    Tenants.parse(json.dumps(content).encode())


def filled(size, tenant=ANYONE):
    shares = Shares()
    queue = FairQueue(door.QUEUE_REQUESTS, shares)
    for number in range(size):
        shares.enter(tenant.name, "")
        queue.push(number, Ticket(str(number), tenant, "", Priority.DEFAULT, 1.0, 1, 0.0))


def nested(depth, value=1):
    for _ in range(depth):
        value = [value]
    return value


def named(name):
    if not plain_name(name):
        raise PackError("x", "not plain")


def refuse(reason):
    return PackError("x", reason)


AT = {
    "coordinator.JSON_DEPTH": lambda n: parse_json(json.dumps({"a": nested(n - 1)}).encode()),
    "coordinator.TOOLS": lambda n: parse_chat({"messages": [HELLO], "tools": [tool(f"f{k}") for k in range(n)]}),
    "coordinator.TOOL_NAME_CHARS": lambda n: parse_chat({"messages": [HELLO], "tools": [tool("x" * n)]}),
    "coordinator.MESSAGES": lambda n: parse_chat({"messages": [{"role": "user", "content": ""}] * n}),
    "coordinator.STOPS": lambda n: asked(stops=["x"] * n),
    "coordinator.STOP_BYTES": lambda n: asked(stops=["é" * (n // 2) + "x" * (n % 2)]),
    "coordinator.STOP_IDS": lambda n: asked(stop_ids=range(n)),
    "coordinator.TOP_LOGPROBS": lambda n: asked(logprobs=True, top_logprobs=n),
    "coordinator.TEMPERATURE_MAX": lambda x: asked(temperature=x),
    "coordinator.TOP_K_MAX": lambda n: asked(top_k=n),
    "coordinator.REPETITION_PENALTY_MAX": lambda x: asked(repetition_penalty=x),
    "coordinator.PENALTY_MAX": lambda x: asked(presence_penalty=x, frequency_penalty=x),
    "coordinator.BIAS_MAX": lambda x: asked(logit_bias={1: x}),
    "coordinator.LOGIT_BIASES": lambda n: asked(logit_bias=dict.fromkeys(range(n), 1.0)),
    "coordinator.MAX_TOKENS_MAX": lambda n: asked(max_tokens=n),
    "coordinator.SESSION_CHARS": lambda n: asked(session="x" * n),
    "coordinator.TIMEOUT_MAX_S": lambda x: asked(timeout_s=float(x)),
    "coordinator.TENANTS": lambda n: tenants({"tenants": [{"name": f"t{k}"} for k in range(n)]}),
    "coordinator.TENANT_KEYS": lambda n: tenants(
        {"tenants": [{"name": "a", "keys": [hash_key(f"{k}") for k in range(n)]}]}
    ),
    "coordinator.END_IDS": lambda n: no_ids_left(GenerationConfig.parse({"eos_token_id": list(range(n))})),
    "coordinator.QUEUE_REQUESTS": filled,
    "coordinator.QUEUE_TENANT_REQUESTS": lambda n: filled(n, Tenant("t")),
    "lanes.MAX_REQUEST_ID_CHARACTERS": lambda n: sent(request_id="x" * n),
    "lanes.MAX_CHECKPOINT_HINTS": lambda n: sent(prompt_ids=[1] * n, checkpoint_positions=range(1, n + 1)),
    "lanes.MAX_GRAMMAR_BYTES": lambda n: sent(grammar="x" * n),
    "lanes.MAX_TENANT_SALT_BYTES": lambda n: sent(tenant_salt=b"x" * n),
    "lanes.MAX_STOP_IDS": lambda n: sent(stop_ids=range(n)),
    "lanes.MAX_TOP_LOGPROBS": lambda n: sent(logprobs=True, top_logprobs=n),
    "lanes.MAX_TEMPERATURE": lambda x: sent({"temperature": x}),
    "lanes.MAX_REPETITION_PENALTY": lambda x: sent({"repetition_penalty": x}),
    "lanes.MAX_PENALTY": lambda x: sent({"presence_penalty": x, "frequency_penalty": -x}),
    "lanes.MAX_BIAS": lambda x: sent({"logit_bias": {1: -x}}),
    "lanes.MAX_LOGIT_BIASES": lambda n: sent({"logit_bias": dict.fromkeys(range(n), 1.0)}),
    "lanes.MAX_PREFILL_CHUNK_ROWS": lambda n: started("--prefill-chunk", str(n)),
    "lanes.MAX_DRAFTS": lambda n: started("--drafts", str(n)),
    "lanes.MAX_SOCKET_PATH_BYTES": lambda n: started("--region-socket", "/" + "x" * (n - 1)),
    "shared_experts.NESTING": lambda n: plain(nested(n), refuse),
    "shared_experts.NODES": lambda n: plain([1] * (n - 1), refuse),
    "shared_experts.FILE_NAME_BYTES": lambda n: named("x" * n),
}


@pytest.mark.parametrize("name", AT)
def test_at_the_limit_and_one_past_it(name):
    table, _, constant = name.partition(".")
    limit = getattr(TABLES[table], constant)
    # the next float that still differs in the fp32 of a lane's message
    past = limit + 1 if isinstance(limit, int) else limit * (1 + 2.0**-22)
    AT[name](limit)
    with pytest.raises(REFUSALS):
        AT[name](past)


def test_the_least_repetition_penalty():
    least = door.REPETITION_PENALTY_MIN
    asked(repetition_penalty=least)
    with pytest.raises(CoordinatorError):
        asked(repetition_penalty=math.nextafter(least, 0))


CONFIG = {
    "model_type": "qwen4_exp_text", "vocab_size": 5000, "hidden_size": 1024, "num_hidden_layers": 40,
    "layer_types": ["linear_attention"] * 40, "num_attention_heads": 4, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 3000, "num_experts": 300, "num_experts_per_tok": 2, "mtp_num_hidden_layers": 3,
    "heads_per_ngram": 64, "ngram_size": 3, "head_dim": 64, "ple_embed_dim": 1024,
}  # fmt: skip


def config():
    TextConfig.parse(CONFIG, refuse)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small checkpoint in two shards with its index, and the pack of it."""
    folder = tmp_path_factory.mktemp("limits")
    small_checkpoint(folder / "checkpoint", tokenizer=True)
    convert(folder / "checkpoint", folder / "pack", experts="q4g32", threads=1)
    header, data = read_header(folder / "checkpoint" / "model.safetensors")
    shutil.copytree(folder / "checkpoint", folder / "sharded")
    names = sorted(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])
    (folder / "sharded" / "model.safetensors").unlink()
    where = {}
    for number, part in enumerate((names[:5], names[5:])):
        first, last = header[part[0]]["data_offsets"][0], header[part[-1]]["data_offsets"][1]
        shard = {n: {**header[n], "data_offsets": [o - first for o in header[n]["data_offsets"]]} for n in part}
        write_header(folder / "sharded" / f"{number}.safetensors", shard, data[first:last])
        where |= dict.fromkeys(part, f"{number}.safetensors")
    (folder / "sharded" / INDEX).write_text(json.dumps({"weight_map": where}))
    return folder


def single(folder):
    Checkpoint.open(folder / "checkpoint").close()


def sharded(folder):
    Checkpoint.open(folder / "sharded").close()


def header_of(folder):
    return read_header(folder / "checkpoint" / "model.safetensors")[0]


def length_of(folder):
    with (folder / "checkpoint" / "model.safetensors").open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def packed(folder):
    return (folder / "pack" / "manifest.msgpack").read_bytes()


def decoded(folder):
    return manifest.decode(packed(folder))


def extras(folder):
    with Checkpoint.open(folder / "checkpoint") as opened:
        if len(opened.extra_files()) < 3:
            raise PackError("x", "not all are carried")


# name: (what is read, given the folder; the amount it has)
HELD = {
    "shared_experts.CONFIG_BYTES": (single, lambda f: (f / "checkpoint" / "config.json").stat().st_size),
    "shared_experts.INDEX_BYTES": (sharded, lambda f: (f / "sharded" / INDEX).stat().st_size),
    "shared_experts.HEADER_BYTES": (single, length_of),
    "shared_experts.TENSORS": (single, lambda f: len(header_of(f).keys() - {"__metadata__"})),
    "shared_experts.TENSOR_NAME_BYTES": (single, lambda f: max(len(n) for n in header_of(f) if n != "__metadata__")),
    "shared_experts.DIMENSIONS": (single, lambda f: max(len(v.get("shape", ())) for v in header_of(f).values())),
    "shared_experts.SHARDS": (sharded, lambda f: 2),
    "shared_experts.VOCABULARY": (lambda f: config(), lambda f: 5000),
    "shared_experts.WIDTH": (lambda f: config(), lambda f: 3000),
    "shared_experts.HIDDEN": (lambda f: config(), lambda f: 1024),
    "shared_experts.LAYERS": (lambda f: config(), lambda f: 40),
    "shared_experts.EXPERTS": (lambda f: config(), lambda f: 300),
    "shared_experts.NGRAM_HEADS": (lambda f: config(), lambda f: 128),
    "shared_experts.DRAFT_LAYERS": (lambda f: config(), lambda f: 3),
    "shared_experts.MANIFEST_BYTES": (decoded, lambda f: len(packed(f))),
    "shared_experts.SECTIONS": (decoded, lambda f: len(decoded(f).sections)),
    "shared_experts.SECTION_BYTES": (
        decoded, lambda f: max(max(s.offset, s.bytes) for s in decoded(f).sections),
    ),
    "shared_experts.NGRAM_ROWS": (
        decoded, lambda f: max(max(t.rows, *t.head_offsets, *t.head_vocab_sizes) for t in decoded(f).ngram),
    ),
    "shared_experts.EXTRA_FILE_BYTES": (
        lambda f: convert(f / "checkpoint", f / "again", experts="q4g32", threads=1),
        lambda f: max((f / "checkpoint" / n).stat().st_size for n in ("tokenizer.json", "config.json")),
    ),
    "shared_experts.EXTRA_FILES": (extras, lambda f: 3),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_what_it_has_at_the_limit_and_one_below(name, made, monkeypatch):
    read, amount_of = HELD[name]
    constant = name.partition(".")[2]
    amount = amount_of(made)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(files, constant, amount)
            read(made)
        shutil.rmtree(made / "again", ignore_errors=True)
        with monkeypatch.context() as patched:
            patched.setattr(files, constant, amount - 1)
            with pytest.raises(REFUSALS):
                read(made)
    finally:
        shutil.rmtree(made / "again", ignore_errors=True)


ELSEWHERE = {
    "coordinator.HOSTS": "fault/test_hosts.py::test_how_many_hosts_and_one_of_a_name",
    "coordinator.REVOKED_BYTES": "unit/test_host_identity.py::test_the_size_of_the_list",
    "coordinator.IDENTITY_BYTES": "unit/test_host_identity.py::test_the_size_of_a_file",
    "coordinator.JOIN_BYTES": "fault/test_hosts.py::test_the_size_of_what_a_host_says",
    "coordinator.BODY_BYTES": "contract/test_door_http.py::test_the_size_of_a_body",
    "coordinator.SMALL_BODY_BYTES":
        "contract/test_door_faults.py::test_a_full_server_still_tells_what_is_wrong_with_a_small_body",
    "coordinator.GENERATION_CONFIG_BYTES": "unit/test_generation_config.py::test_size_at_the_limit",
    "coordinator.CLIENT_REQUEST_ID_CHARS":
        "contract/test_door_http.py::test_ids_are_the_servers_and_the_clients_is_only_echoed",
    "lanes.MAX_GRAMMAR_SYMBOLS": "unit/test_grammar.py::test_symbols_are_bounded_at_the_door_and_in_a_lane",
    "lanes.MAX_PROFILES": "unit/test_expert_profile.py::test_so_many_files_are_read_and_no_more",
    "lanes.GRAMMAR_COMPILE_S": "unit/test_grammar.py::test_a_compilation_is_waited_for_until_a_limit_or_a_cancel",
    "lanes.MAX_TOKENIZER_BYTES": "unit/test_grammar.py::test_a_tokenizer_over_the_limit_is_not_read",
    "coordinator.GRAMMAR_BYTES": "unit/test_grammar.py::test_schemas_are_bounded",
    "coordinator.SCHEMA_LEVELS": "unit/test_grammar.py::test_references_are_bounded",
    "coordinator.SCHEMA_PATTERNS": "unit/test_grammar.py::test_patterns_of_one_value_are_bounded",
    "coordinator.SCHEMA_PROPERTIES": "unit/test_grammar.py::test_properties_are_bounded",
    "coordinator.GRAMMAR_SYMBOLS": "unit/test_grammar.py::test_symbols_are_bounded_at_the_door_and_in_a_lane",
    "coordinator.SCHEMA_STEPS": "unit/test_grammar.py::test_looking_for_patterns_is_bounded",
    "coordinator.CHAT_TEMPLATE_BYTES": "unit/test_chat_format.py::test_a_file_over_the_limit_is_not_read",
    "coordinator.TOKENIZER_FILE_BYTES": "unit/test_tokenizer.py::test_a_file_over_the_limit_is_not_read",
    "coordinator.TOKENIZER_IDS": "unit/test_tokenizer.py::test_the_greatest_id",
    "coordinator.AFFINITY_SESSIONS": "unit/test_affinity.py::test_forgets_the_least_recently_used_at_the_bound",
    "coordinator.REPLAYS": "unit/test_dispatch_failover.py::test_an_answer_is_replayed_twice_and_not_three_times",
    "coordinator.BUFFERED_TOKENS": "unit/test_generation.py::test_a_reader_too_far_behind_is_found_at_the_bound",
    "coordinator.LANE_CAPACITY": "unit/test_dispatch.py::test_never_two_on_one_lane_and_in_order_of_arrival",
    "coordinator.VISIT_WORK": "unit/test_visits.py::test_work_at_the_limit_and_past_it",
    "coordinator.VISITS": "unit/test_visits.py::test_visits_at_the_limit_and_past_it",
    "coordinator.CRASHES_TO_QUARANTINE": "unit/test_fleet.py::test_the_third_crash_inside_the_window_means_quarantine",
    "coordinator.CRASH_WINDOW_S": "unit/test_fleet.py::test_a_third_crash_outside_the_window_does_not",
    "coordinator.TENANTS_FILE_BYTES": "unit/test_tenants.py::test_the_file_is_ours_alone_and_bounded",
    "coordinator.FLEET_FILE_BYTES": "unit/test_fleet_memory.py::test_links_and_long_files_are_no_memory",
    "coordinator.STREAM_BUFFER_BYTES":
        "contract/test_door_faults.py::test_a_client_that_reads_nothing_costs_a_lane_no_whole_answer",
    "coordinator.QUEUE_BYTES": "unit/test_fair_queue.py::test_bounds_in_requests_bytes_and_of_a_tenant",
    "coordinator.SHARE_CREDIT":
        "unit/test_fair_queue.py::test_a_tenant_that_comes_back_is_owed_a_little_and_no_more",
    "coordinator.SHARE_ACCOUNTS":
        "unit/test_fair_queue.py::test_families_and_idle_accounts_are_forgotten_at_their_bounds",
    "coordinator.KNOWN_PREFIXES": "unit/test_placement.py::test_prefixes_of_a_lane_are_bounded",
    "coordinator.PAGE_SUBSCRIBERS": "contract/test_live_page.py::test_no_more_than_the_limit_watch",
    "coordinator.PAGE_SAMPLES": "unit/test_page_history.py::test_the_newest_samples_are_kept",
    "coordinator.PAGE_FAILURES": "unit/test_journal.py::test_what_is_kept_of_ended_requests_is_bounded",
    "coordinator.PAGE_FIRST_TOKENS": "unit/test_journal.py::test_what_is_kept_of_ended_requests_is_bounded",
    "coordinator.PAGE_CHANGES": "unit/test_page_history.py::test_the_newest_changes_are_kept",
    "coordinator.PAGE_QUEUE_ROWS":
        "unit/test_page_snapshot.py::test_rows_of_the_queue_are_bounded_and_the_rest_is_counted",
    "coordinator.PAGE_CONVERSATIONS": "unit/test_kept.py::test_as_many_as_the_limit",
    "coordinator.PAGE_LAYERS": "unit/test_page_snapshot.py::test_cells_of_a_cache_map_are_bounded",
    "coordinator.PAGE_NAME_CHARS": "unit/test_page_snapshot.py::test_long_names_are_cut",
    "coordinator.TRACE_STAMPS": "unit/test_trace.py::test_stamps_at_the_limit_and_one_past_it",
    "coordinator.TRACE_WAITING": "unit/test_trace.py::test_a_disk_that_does_not_keep_up_loses_lines_and_nothing_else",
    "coordinator.TRACE_FILE_BYTES": "unit/test_trace.py::test_a_full_file_is_followed_by_another",
    "coordinator.TRACE_FILES": "unit/test_trace.py::test_a_full_file_is_followed_by_another",
    "coordinator.GRPC_MESSAGE_BYTES": "contract/test_door_grpc.py::test_a_message_over_the_limit",
    "coordinator.GRPC_METADATA_BYTES": "security/test_grpc_limits.py::test_metadata",
    "coordinator.GRPC_CALLS": "security/test_grpc_limits.py::test_calls_at_once",
    "coordinator.GRPC_OTHER_CALLS": "security/test_grpc_limits.py::test_calls_that_ask_for_no_answer",
    "coordinator.CHECKPOINT_HINTS": "unit/test_renderer.py::test_where_messages_begin",
    "lanes.MAX_RESIDENTS": "unit/test_conversations.py::test_slots_are_bounded_and_what_waits_makes_room",
    "lanes.MAX_CHECKPOINTS": "unit/test_conversations.py::test_checkpoints_are_bounded",
    "lanes.MOST_INHERITED": "unit/test_parking.py::test_checkpoints_that_only_the_pool_has_are_bounded",
    "lanes.MOST_HEADER_BYTES": "unit/test_parking.py::test_a_header_over_the_limit_is_not_read",
    "shared_experts.PARK_ENTRIES": "unit/test_park_index.py::test_entries_are_bounded",
    "shared_experts.PARK_BLOBS": "unit/test_park_index.py::test_parts_and_marks_are_bounded",
    "shared_experts.PARK_MARKS": "unit/test_park_index.py::test_parts_and_marks_are_bounded",
    "shared_experts.PARK_REMOVALS":
        "unit/test_park_index.py::test_whatever_happens_a_mirror_follows_and_segments_are_whole",
    "shared_experts.PARK_MARKS_PER_REPLY":
        "unit/test_park_index.py::test_whatever_happens_a_mirror_follows_and_segments_are_whole",
    "shared_experts.PARK_BLOBS_PER_MESSAGE": "unit/test_park_server.py::test_parts_of_a_message_are_bounded",
    "shared_experts.PARK_MESSAGE_BYTES": "unit/test_park_server.py::test_the_size_of_a_message_is_bounded",
    "shared_experts.PARK_CONNECTIONS": "unit/test_park_server.py::test_connections_are_bounded",
    "shared_experts.PARK_DISK_AGE_S": "unit/test_park_disk.py::test_bytes_and_age_are_bounded",
    "shared_experts.PARK_POOL_BYTES": "unit/test_park_server.py::test_the_pool_is_bounded",
    "lanes.PREFIXES": "unit/test_prefixes.py::test_of_too_many_the_last_ones_are_told",
    "lanes.PREFIX_NEWS": "unit/test_prefixes.py::test_a_reader_that_fell_behind_gets_a_snapshot",
    "lanes.PREFIXES_PER_EVENT": "unit/test_prefixes.py::test_events_are_bounded",
    "lanes.MAX_RECEIVE_BYTES": "contract/test_lane_server.py::test_message_size_limit",
    "lanes.OUTBOX_TOKENS": "unit/test_outbox.py::test_full_box_gives_up_after_the_patience_and_still_takes_the_end",
    "lanes.TRACE_BYTES": "unit/test_routing_trace.py::test_a_file_over_the_limit_is_refused",
    "lanes.MAX_TRACE_LAYERS": "unit/test_routing_trace.py::test_limits_themselves_are_read",
    "lanes.MAX_TRACE_EXPERTS": "unit/test_routing_trace.py::test_limits_themselves_are_read",
    "lanes.DRAFT_VOCABULARY_BYTES": "unit/test_draft_vocabulary.py::test_a_file_of_the_limit_and_one_byte_more",
    "lanes.MAX_TRACE_ROWS": "unit/test_routing_trace.py::test_limits_themselves_are_read",
    "shared_experts.DAMAGE_RECORD_BYTES": "unit/test_damage_record.py::test_a_record_over_the_limit_is_none",
    "shared_experts.GOLDEN_BYTES": "unit/test_golden_record.py::test_links_and_long_files_are_refused",
    "shared_experts.GOLDEN_TOKENS": "unit/test_golden_record.py::test_a_record_at_its_limits_is_read",
    "shared_experts.GOLDEN_EXPERTS": "unit/test_golden_record.py::test_a_record_at_its_limits_is_read",
    "shared_experts.GOLDEN_TOP": "unit/test_golden_record.py::test_a_record_at_its_limits_is_read",
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_named_test_exists(name):
    path, _, function = ELSEWHERE[name].partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


# Ends in _S or _MS: a time, tested where it is waited for. Begins with DEFAULT_: what holds when nobody says.
NO_BOUND = {
    "coordinator.GATE_BUFFER_BYTES": "more waits",
    "coordinator.KIB": "a unit",
    "coordinator.MIB": "a unit",
    "coordinator.SUSPECT_STEPS": "a time, in steps",
    "coordinator.KILL_STEPS": "a time, in steps",
    "coordinator.INLINE_ENCODE_CHARS": "more goes to a thread",
    "coordinator.INLINE_PARSE_BYTES": "more goes to a thread",
    "coordinator.INLINE_PROMPT_TOKENS": "more goes to a thread",
    "coordinator.TEXT_THREADS": "more waits",
    "coordinator.TOKEN_BYTES": "a size",
    "coordinator.COLD_COST": "a price",
    "coordinator.PASSING": "a price",
    "coordinator.LOOKAHEAD": "more waits",
    "coordinator.VISIT_HOSTS": "the others are not looked at",
    "coordinator.VISIT_ALONE": "a price",
    "coordinator.WARM_TOKENS": "a price",
    "coordinator.PARKED_WORTH": "a price",
    "coordinator.GRPC_STREAMS_PER_CONNECTION": "more waits: the transport's own rule",
    "coordinator.REPETITION_PENALTY_MIN": "a least value, with a test of its own here",
    "lanes.PROTOCOL_VERSION": "a version",
    "lanes.MAX_METADATA_BYTES": "of the coordinator's calls only; the transport's own rule",
    "lanes.MAX_STREAMS_PER_CONNECTION": "more waits: the transport's own rule",
    "lanes.MAX_CONCURRENT_CALLS": "of the coordinator's calls only; the transport's own rule",
    "lanes.MAX_WINDOW_TOKENS": "one more than MAX_DRAFTS",
    "lanes.LOOKAHEAD_BYTES": "a buffer of the transport",
    "lanes.CHUNK_TOKENS": "more comes in the next message",
    "lanes.GRAMMAR_LOOK_S": "an interval",
    "lanes.PAGE_TOKENS": "a size",
    "lanes.RING_SLOTS": "a size",
    "lanes.MAX_RING_SLOTS": "a size; tests/unit/test_reading.py has the limit",
    "lanes.PROMPT_PLACES": "a size; more come in the next batch",
    "lanes.LEAST_PARKED_TOKENS": "a least value; fewer are read again",
    "lanes.PARK_BYTES_PER_STEP": "more waits for the next window",
    "shared_experts.PARK_LEAST_BYTES": "a least value; the pool is taken as it fills",
    "shared_experts.PARK_SEGMENT_BYTES": "a size",
    "shared_experts.PARK_SHARE": "a share",
    "lanes.CHECKPOINT_EVERY_TOKENS": "a distance",
    "lanes.CHECKPOINT_GAP_TOKENS": "a distance",
    "lanes.SCRATCH_BYTES": "more is worked off in parts",
    "lanes.GPU_SWAP_BYTES_PER_WINDOW": "more waits for the next window",
    "lanes.CUDA_CONTEXT_BYTES": "a part of a budget, set aside",
    "lanes.CUDA_WORKSPACE_BYTES": "a part of a budget, set aside",
    "lanes.PROMPT_ROWS_IN_PLACE": "a size; the expert cache lends what longer passes take",
    "lanes.VRAM_RESERVE_BYTES": "a part of a budget, set aside",
    "lanes.SWAP_BYTES_PER_WINDOW": "more waits for the next window",
    "shared_experts.BLOCK_BYTES": "more is read in parts",
}


def test_every_limit_is_in_one_place():
    names = {
        f"{table}.{name}" for table, module in TABLES.items() for name in vars(module)
        if name.isupper() and not name.startswith("_")
    }  # fmt: skip
    times = {name for name in names if name.endswith(("_S", "_MS")) or ".DEFAULT_" in name}
    listed = [*AT, *HELD, *ELSEWHERE, *NO_BOUND]
    assert sorted(names - set(listed) - times) == [], "neither tested nor excused"
    assert sorted(set(listed) - names) == [], "no such limit any more"
    assert len(listed) == len(set(listed))
