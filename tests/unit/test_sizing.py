"""The sizing calculator: equal to the lanes' own arithmetic, never better with less, true to what was measured."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli import main
from coordinator.errors import BadOption, BadPack
from coordinator.model_sizes import ModelSizes, read_sizes
from coordinator.sizing import GPU_FIXED_BYTES, Host, Load, Rates, most_lanes, plan
from coordinator.units import rate, size
from tests.fakes.processes import tiny_pack

GIB = 1 << 30
# The released model: figures from its config, see docs/model.md; records of q4g64 with their padding.
LARGE = ModelSizes(
    name="large", expert_format="q4g64", layers=48, experts=512, experts_per_token=10, record_bytes=2_613_248,
    region_bytes=48 * 512 * 2_613_248, dense_elements=5_000_000_000, dense_elements_per_token=4_265_000_000,
    embedding_elements=635_700_000,
    pack_element_bytes=2, key_elements_per_token=13_800.0, block_bytes_per_token=0.0, fixed_state_bytes=118_000_000,
    chunk_row_bytes=16 * 4 * 2560,
    context_tokens=262_144, ngram_bytes=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("plan"))


def test_sizes_are_those_of_the_lanes_own_spec(pack):
    import torch

    from coordinator.pack_facts import inspect_pack
    from lanes.models.qwen4_exp.spec import Spec

    said = inspect_pack(pack)
    sizes, spec = read_sizes(said), Spec.from_config(said["config"])
    assert sizes.dense_elements_per_token == spec.dense_parameters_per_token()
    assert sizes.expert_bytes_per_token == spec.expert_bytes_per_token(sizes.expert_format)
    assert sizes.fixed_state_bytes == spec.state_shape(torch.float32, drafts=True).fixed_bytes()
    for dtype, element in ((torch.float32, 4), (torch.bfloat16, 2)):
        block = spec.index_block_tokens
        assert sizes.conversation_bytes(16 * block, element) == spec.state_shape(dtype, drafts=True).bytes(16 * block)
    assert 0 < sizes.dense_elements_per_token <= sizes.dense_elements
    assert sizes.embedding_elements == said["config"]["vocab_size"] * said["config"]["hidden_size"]


@pytest.mark.parametrize("damage", ["architecture", "config", "experts", "sections", "dense_dtype"])
def test_a_description_that_lacks_something_is_refused(pack, damage):
    from coordinator.pack_facts import inspect_pack

    said = inspect_pack(pack)
    del said[damage]
    with pytest.raises(BadPack):
        read_sizes(said)


def test_the_large_model_on_a_gpu_is_what_its_parts_were_measured_to_be():
    """Dense 2.0 ms, hits 0.3, misses at link + CPU rate, handshake 0.35: 5 to 7 ms at 75 % hits with 16 GiB."""
    host = Host("cuda", 256 * GIB, 16 * GIB, 16)
    rates = Rates(gpu_gb_per_s=4265.0, gpu_layer_us=0.0)
    found = plan(LARGE, host, Load(1, 8192, hit_rate=0.75), rates, 1)
    assert found.fits
    assert 5.0 < 1e3 / found.tokens_per_s[0] < 7.0
    assert found.cache_bytes < 16 * GIB - found.dense_bytes - GPU_FIXED_BYTES
    assert (found.cores_per_lane, found.cores_spare) == (15, 1)


def test_the_cache_of_a_gpu_lane_is_nearly_what_a_lane_planned_for_itself():
    """16 GiB on an H200, context of 16,384 tokens: 4.45 GB beside a chunk of 8,192 rows (its log: `vram_budget`); 7,168
    of them lie in memory that the cache has between prompts."""
    found = plan(LARGE, Host("cuda", 256 * GIB, 16 * GIB, 16), Load(4, 16384), Rates(), 1)
    assert found.cache_bytes == pytest.approx(4.453e9 + 7168 * LARGE.chunk_row_bytes, rel=0.03)
    assert found.prefill_chunk_tokens == 8192
    more = plan(LARGE, Host("cuda", 256 * GIB, 16 * GIB, 16), Load(5, 16384), Rates(), 1)
    assert more.cache_bytes == found.cache_bytes
    assert more.lane_ram_bytes > found.lane_ram_bytes


def test_a_prompt_waits_for_the_slower_of_link_and_products_and_for_launches():
    host = Host("cuda", 256 * GIB, 16 * GIB, 16)
    slow_link = plan(LARGE, host, Load(1, 8192), Rates(link_gb_per_s=5.0, gpu_prompt_layer_us=0.0), 1)
    whole_region_s = LARGE.region_bytes / 5e9
    assert slow_link.prefill_tokens_per_s == pytest.approx(8192 / whole_region_s, rel=0.15)  # a tenth is cached
    row_s = 2 * LARGE.dense_elements_per_token / 100e12 + LARGE.expert_bytes_per_token / 5e12
    rates = Rates(gpu_prompt_dense_gb_per_s=1e5, gpu_prompt_expert_gb_per_s=5e3, gpu_prompt_layer_us=1000.0)
    found = plan(LARGE, host, Load(1, 8192), rates, 1)
    assert found.prefill_tokens_per_s == pytest.approx(8192 / (0.048 + 8192 * row_s))
    assert found.prefill_s["link"] < found.prefill_s["products"]


def test_ram_and_vram_at_the_limit_and_one_byte_less():
    host = Host("cpu", 1 << 50, 0, 8)
    need = 0 - (plan(LARGE, dataclasses.replace(host, ram_bytes=0), Load(), Rates(), 2).ram_free_bytes)
    assert plan(LARGE, dataclasses.replace(host, ram_bytes=need), Load(), Rates(), 2).fits
    assert (
        "RAM: 1 B are missing"
        in plan(LARGE, dataclasses.replace(host, ram_bytes=need - 1), Load(), Rates(), 2).reasons[0]
    )
    one = plan(LARGE, Host("cuda", 1 << 50, 1 << 50, 8), Load(), Rates(), 1)
    staging_bytes = LARGE.fixed_state_bytes
    need = one.dense_bytes + one.state_bytes // Load().conversations + staging_bytes + GPU_FIXED_BYTES
    assert plan(LARGE, Host("cuda", 1 << 50, need, 8), Load(), Rates(), 1).fits
    assert "VRAM: 1 B are missing" in plan(LARGE, Host("cuda", 1 << 50, need - 1, 8), Load(), Rates(), 1).reasons[0]


def test_a_small_budget_gives_half_of_what_is_free_to_a_chunk():
    host = Host("cuda", 256 * GIB, 12 * GIB, 16)
    found = plan(LARGE, host, Load(1, 1096), Rates(), 1)
    assert 0 < found.prefill_chunk_tokens < 8192
    chunk_bytes = found.prefill_chunk_tokens * LARGE.chunk_row_bytes
    lent_bytes = chunk_bytes - 1024 * LARGE.chunk_row_bytes
    assert found.cache_bytes - lent_bytes == pytest.approx(chunk_bytes, rel=0.01)


def test_lanes_up_to_what_fits():
    host = Host("cpu", 1 << 50, 0, 3)
    assert most_lanes(LARGE, host, Load(), Rates(), 8) == 3  # cores
    assert plan(LARGE, host, Load(), Rates(), 4).reasons == ("cores: 4 lanes on 3",)
    assert most_lanes(LARGE, dataclasses.replace(host, ram_bytes=GIB), Load(), Rates(), 8) == 0


@given(
    device=st.sampled_from(["cpu", "cuda"]), ram=st.integers(0, 1 << 40), vram=st.integers(0, 1 << 38),
    cores=st.integers(1, 256), lanes=st.integers(1, 16), more=st.sampled_from(["ram_bytes", "vram_bytes", "cores"]),
    by=st.integers(1, 1 << 36),
)  # fmt: skip
def test_more_never_makes_it_worse(device, ram, vram, cores, lanes, more, by):
    host = Host(device, ram, vram, cores)
    richer = dataclasses.replace(host, **{more: getattr(host, more) + (by % 256 + 1 if more == "cores" else by)})
    a, b = (plan(LARGE, each, Load(), Rates(), lanes) for each in (host, richer))
    assert b.tokens_per_s >= a.tokens_per_s
    assert b.cache_bytes >= a.cache_bytes
    if more != "vram_bytes" or device == "cuda":  # a CPU lane's cache is RAM
        assert b.ram_free_bytes >= a.ram_free_bytes
        assert b.fits >= a.fits
    assert 0 <= a.hit_rate[0] <= a.hit_rate[1] <= 1
    assert a.total_tokens_per_s[0] == pytest.approx(lanes * a.tokens_per_s[0])
    assert sum(low for name, (low, _) in a.bytes_per_token.items() if name != "dense") == pytest.approx(
        LARGE.expert_bytes_per_token
    )


@given(field=st.sampled_from([f.name for f in dataclasses.fields(Rates)]), factor=st.floats(1.01, 100))
def test_a_better_rate_never_makes_it_slower(field, factor):
    better = getattr(Rates(), field) * (1 / factor if field.endswith("_us") else factor)
    for device in ("cpu", "cuda"):
        host = Host(device, 1 << 40, 16 * GIB, 16)
        a = plan(LARGE, host, Load(), Rates(), 2)
        b = plan(LARGE, host, Load(), dataclasses.replace(Rates(), **{field: better}), 2)
        assert b.tokens_per_s >= a.tokens_per_s


def run(capsys, *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_the_command_prints_one_object_and_says_what_it_assumes(pack, capsys):
    code, out = run(capsys, str(pack), "--ram", "4GiB", "--cores", "4", "--lanes", "2", "--json")
    said = json.loads(out)
    assert code == 0
    assert [each["lanes"] for each in said["plans"]] == [2]
    assert said["rates"]["measured"] is False
    assert len(said["assumptions"]) >= 4
    code, out = run(capsys, str(pack), "--ram", "4GiB", "--cores", "4")
    assert code == 0
    assert "assumed:" in out


def test_what_does_not_fit_has_exit_code_1(pack, capsys):
    code, out = run(capsys, str(pack), "--ram", "1MiB", "--cores", "1", "--json")
    assert code == 1
    assert json.loads(out)["plans"][0]["fits"] is False
    assert json.loads(run(capsys, str(pack), "--ram", "0", "--json")[1])["host"]["ram_bytes"] == 0  # not the default


def test_a_gpu_without_room_for_a_row_is_told_no_rates_of_prompts(pack, capsys):
    code, out = run(capsys, str(pack), "--device", "cuda", "--vram", "1MiB")
    assert (code, "reading a long prompt" in out) == (1, False)
    assert "reading a long prompt" in run(capsys, str(pack), "--device", "cuda", "--vram", "16GiB")[1]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rates": 1}', '{"rates": {"no_such": 1}}', '{"rates": {"core_gb_per_s": 0}}',
             '{"rates": {"core_gb_per_s": "4"}}', '{"rates": {"core_gb_per_s": NaN}}', "[" * 5000],
)  # fmt: skip
def test_a_rates_file_is_refused_by_name(tmp_path, pack, capsys, text):
    from coordinator.cli.plan import read_rates

    file = tmp_path / "rates.json"
    file.write_text(text)
    with pytest.raises(BadOption, match="rate"):
        read_rates(file)


def test_given_rates_win(tmp_path, pack, capsys):
    file = tmp_path / "rates.json"
    file.write_text('{"rates": {"cpu_layer_us": 0}, "command": "whatever"}')
    _, out = run(capsys, str(pack), "--rates", str(file), "--lanes", "1", "--json")
    assert json.loads(out)["rates"]["cpu_layer_us"] == 0
    assert json.loads(out)["rates"]["measured"] is True


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (-619_455_808, "-590.8 MiB"), (3 * GIB // 2, "1.5 GiB"),
     (4096 * GIB, "4096 GiB")],
)  # fmt: skip
def test_bytes_in_words(number, said):
    assert size(number) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0"),
        (0.1234, "0.123"),
        (88.16, "88.2"),
        (99.96, "100"),
        (118.4, "118"),
        (999.6, "1000"),
        (13_470, "13500"),
    ],
)
def test_rates_in_words_have_no_exponent(value, said):
    assert rate(value) == said


def test_what_is_missing_is_said_as_sizes(capsys, pack):
    code, out = run(capsys, str(pack), "--ram", "1000000000", "--cores", "2")
    assert code == 1
    assert "1 lane does not fit: RAM: " in out
    assert " MiB are missing" in out
