import json

import pytest

from coordinator import limits
from coordinator.text.chat_format import CONFIG_FILE, TEMPLATE_FILE, ChatFormat
from tests.fakes.qwen_template import TEMPLATE


def test_told_from_the_template(tmp_path):
    assert ChatFormat.load(tmp_path) == ChatFormat()
    (tmp_path / TEMPLATE_FILE).write_text(TEMPLATE)
    assert ChatFormat.load(tmp_path) == ChatFormat(thinks=True, says_effort=True)
    assert ChatFormat.of(TEMPLATE.replace("reasoning_effort", "")) == ChatFormat(thinks=True)
    assert ChatFormat.of("{{ messages }} reasoning_effort") == ChatFormat()


def test_or_from_the_tokenizers_configuration(tmp_path):
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"chat_template": TEMPLATE}))
    assert ChatFormat.load(tmp_path).thinks


@pytest.mark.parametrize("text", ["", "{", "[]", '{"chat_template": 7}', "[" * 100_000, "\udcff"])
def test_a_file_that_says_nothing_is_the_plain_format(tmp_path, text):
    (tmp_path / CONFIG_FILE).write_bytes(text.encode(errors="surrogateescape"))
    assert ChatFormat.load(tmp_path) == ChatFormat()
    (tmp_path / TEMPLATE_FILE).write_bytes(b"\xff<think>")
    assert ChatFormat.load(tmp_path) == ChatFormat()


def test_a_file_over_the_limit_is_not_read(tmp_path):
    (tmp_path / TEMPLATE_FILE).write_text("<think>".ljust(limits.CHAT_TEMPLATE_BYTES))
    assert ChatFormat.load(tmp_path).thinks
    (tmp_path / TEMPLATE_FILE).write_text("<think>".ljust(limits.CHAT_TEMPLATE_BYTES + 1))
    assert not ChatFormat.load(tmp_path).thinks
