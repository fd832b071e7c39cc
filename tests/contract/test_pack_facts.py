"""Options that cannot work with a pack are refused before any process starts: facts asked of the pack tools."""

import hashlib
import shutil

import pytest

from coordinator.cli import main
from coordinator.config import Address
from coordinator.errors import BadOption, BadPack, CoordinatorError, EmptyPrompt, TokenOutOfRange
from coordinator.frontdoor import start_doors
from coordinator.pack_facts import PackFacts, read_digests, read_facts
from tests.fakes.processes import tiny_pack
from tests.fakes.roster import FakeRoster

FACTS = PackFacts(context_tokens=64, vocab_size=256, record_bytes=1000)
UNKNOWN = PackFacts(context_tokens=None, vocab_size=None, record_bytes=1000)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("facts"))


def test_facts_are_those_of_the_pack(pack):
    from shared_experts.pack import Pack

    with Pack.open(pack) as opened:
        manifest = opened.manifest
    facts, config, experts = read_facts(pack), manifest.config, manifest.experts
    assert manifest.dense_dtype == "f32"
    dense = sum(section.bytes for section in manifest.sections if section.name == "dense")
    assert facts == PackFacts(
        config["max_position_embeddings"], config["vocab_size"], experts.record_bytes, facts.region_bytes, dense,
        4 * config["vocab_size"] * config["hidden_size"],
    )  # fmt: skip
    assert facts.region_bytes >= experts.layers * experts.experts * experts.record_bytes


def test_digests_are_those_of_the_packs_files(pack, tmp_path):
    files = [path for path in pack.iterdir() if path.suffix in (".json", ".jinja") and path.name != "golden.json"]
    assert read_digests(pack) == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert files
    assert read_digests(tmp_path) is None


async def test_a_file_that_was_changed_is_not_served(pack, tmp_path):
    copy = shutil.copytree(pack, tmp_path / "copy")
    changed = bytearray((copy / "generation_config.json").read_bytes())
    changed[-2:-1] = b" "
    (copy / "generation_config.json").write_bytes(changed)  # as long as before
    with pytest.raises(BadPack, match="not the file that the pack was made with"):
        await start_doors(FakeRoster(), copy, http=Address("127.0.0.1", 0), grpc_at=Address(path=f"{tmp_path}/grpc"))


def test_what_the_pack_tools_refuse_is_said_in_their_words(tmp_path):
    (tmp_path / "manifest.msgpack").write_bytes(b"no manifest")
    with pytest.raises(CoordinatorError) as refused:
        read_facts(tmp_path)
    assert refused.value.code == "bad_pack"
    assert str(tmp_path / "manifest.msgpack") in refused.value.message


def test_context_at_the_limit_and_beyond():
    FACTS.check_context(None)
    FACTS.check_context(64)
    with pytest.raises(BadOption, match="65 tokens; the model holds at most 64"):
        FACTS.check_context(65)
    UNKNOWN.check_context(1 << 20)


def test_prompts_at_the_limit_and_beyond():
    FACTS.check_prompt([0, 255], None)
    FACTS.check_prompt([0] * 63, None)
    UNKNOWN.check_prompt([1 << 31] * 1000, None)
    with pytest.raises(TokenOutOfRange, match="from 0 to 255"):
        FACTS.check_prompt([256], None)
    with pytest.raises(CoordinatorError, match=r"context length is 64 tokens.* has 64 tokens"):
        FACTS.check_prompt([0] * 64, None)
    with pytest.raises(CoordinatorError, match=r"context length is 8 tokens.* has 8 tokens"):
        FACTS.check_prompt([0] * 8, 8)
    with pytest.raises(EmptyPrompt):
        UNKNOWN.check_prompt([], None)


@pytest.mark.parametrize(("budget", "warned"), [(0, False), (1, True), (999, True), (1000, False)])
def test_a_cache_that_holds_nothing_is_told_unless_it_was_asked_for(budget, warned):
    assert (FACTS.cache_warning(budget) is not None) == warned


@pytest.mark.parametrize(
    ("words", "code"),
    [(("serve", "PACK", "--context", "100000"), "bad_option"), (("serve", "PACK", "--device", "cuda"), "bad_option"),
     (("generate", "PACK", "--prompt-ids", "1,99999"), "token_out_of_range"),
     (("generate", "PACK", "--prompt", ""), "empty_prompt"),
     (("generate", "PACK", "--prompt", "x", "--context", "100000"), "bad_option")],
)  # fmt: skip
def test_nothing_starts_for_what_cannot_work(pack, words, code, monkeypatch, capsys):
    def start(*_, **__):
        raise AssertionError("it would start processes")

    for name in ("serve.run_cluster", "generate.solo"):
        monkeypatch.setattr(f"coordinator.cli.{name}", start)
    for name in ("serve", "generate"):
        monkeypatch.setattr(f"coordinator.cli.{name}.configure_logging", lambda **_: None)  # of this whole process
    with pytest.raises(SystemExit) as ended:
        main([str(pack) if word == "PACK" else word for word in words])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {code}: ")


def test_a_small_cache_is_warned_of_before_the_start(pack, monkeypatch, capsys):
    async def run_cluster(*_):
        assert "less than one expert" in capsys.readouterr().err

    monkeypatch.setattr("coordinator.cli.serve.run_cluster", run_cluster)
    monkeypatch.setattr("coordinator.cli.serve.configure_logging", lambda **_: None)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(pack), "--vram-budget", "100"])
    assert ended.value.code == 0
