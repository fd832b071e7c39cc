"""The demo model's corpus: reading archives, choosing documents, conversations, files of tokens."""

import subprocess
import zipfile

import jinja2
import numpy as np
import pytest

from coordinator.text.chat_format import ChatFormat
from coordinator.text.conversation import ChatMessage, Conversation, Thinking
from coordinator.text.desk import _encode
from coordinator.text.renderer import PlainText, render
from coordinator.text.tokenizer import Tokenizer
from deploy.demo_model import tokenizer as demo_tokenizer
from deploy.demo_model.data import chat, choose, tokens
from deploy.demo_model.data.documents import Document, read_debian, read_wheel, text_of_html
from deploy.demo_model.data.sources import DEBIAN, read_sources

FUNCTION = '''def area(width, height):
    """Give the area of a rectangle of that width and height.

    More about it.
    """
    product = width * height
    return product
'''


def wheel(path, files, licence="License-Expression: MIT"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "thing-1.0.dist-info/METADATA", f"Metadata-Version: 2.4\nName: Thing\nVersion: 1.0\n{licence}\n\n# Thing\n"
        )
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_wheel_gives_its_description_and_files_by_name(tmp_path):
    found = read_wheel(
        wheel(tmp_path / "thing.whl", {"b.py": "b = 1\n", "a.md": "# A\n", "c.so": "x", "d.py": "#" * 400_001})
    )
    assert (found.name, found.version, found.licence) == ("thing", "1.0", "MIT")
    assert [(d.path, d.kind, d.text) for d in found.documents] == [
        ("README", "prose", "# Thing\n"), ("a.md", "prose", "# A\n"), ("b.py", "code", "b = 1\n"),
    ]  # fmt: skip


def test_a_debian_package_gives_the_sources_of_its_pages(tmp_path):
    files = {
        "usr/share/doc/x/html/page.html": "<p>made</p>", "usr/share/doc/x/html/_sources/page.rst.txt": "source\n",
        "usr/lib/x/m.py": "m = 1\n", "usr/share/doc/x/e.py": "e = 1\n",
    }  # fmt: skip
    root = tmp_path / "root"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN" / "control").write_text(
        "Package: x-doc\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: x\n"
    )
    path = tmp_path / "x-doc_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", str(root), str(path)], check=True, capture_output=True)
    assert [(d.source, d.kind, d.text) for d in read_debian(path)] == [
        ("x-doc", "code", "m = 1\n"), ("x-doc", "prose", "source\n"),
    ]  # fmt: skip


def test_pages_become_text():
    page = "<head><title>no</title></head><h1>Head</h1><p>A <b>two</b> &amp;\n three</p><pre>a\n  b</pre>"
    assert text_of_html(page) == "Head\n\nA two & three\n\na\n  b\n"
    assert "no" not in text_of_html(page)


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True), ("License :: OSI Approved :: Apache Software License", True), ("BSD-3-Clause AND PSF-2.0", True),
        ("GPL-3.0-only", False), ("MIT OR GPL-2.0", False), ("License :: OSI Approved :: GNU LGPL", False),
        ("MPL-2.0", False), ("", False), ("Proprietary", False), ("see LICENSE", False),
    ],
)  # fmt: skip
def test_licences(licence, allowed):
    assert choose.permissive(licence) is allowed


def test_the_list_names_permissive_sources_once():
    sources = read_sources()
    assert len(sources) > 300
    assert len({(s.registry, s.name) for s in sources}) == len(sources)
    for source in sources:
        assert choose.permissive(source.licence), source
        assert source.registry == "pypi" or source.name in DEBIAN


def document(text, path="a.py", source="p", kind="code"):
    return Document(source, path, kind, text)


def lines(first, last):
    return "".join(f"value_number_{i} = compute_something({'x' * (i % 7)})\n" for i in range(first, last))


def test_near_duplicates_are_dropped():
    kept = list(
        choose.Chooser().keep(
            [
                document(lines(0, 40)),
                document(lines(0, 40) + "# one more line\n"),
                document(lines(15, 55)),
                document(lines(30, 90)),
            ]
        )
    )
    assert [d.text for d in kept] == [lines(0, 40), lines(30, 90)]


def test_a_package_is_cut_off_at_its_size(monkeypatch):
    first, second = document(lines(0, 50)), document(lines(50, 100))
    size = len(first.text)
    monkeypatch.setattr(choose, "SOURCE_BYTES", size + len(second.text))
    assert len(list(choose.Chooser().keep([first, second]))) == 2
    monkeypatch.setattr(choose, "SOURCE_BYTES", size + len(second.text) - 1)
    assert [d.text for d in choose.Chooser().keep([first, second])] == [first.text]


@pytest.mark.parametrize(
    ("path", "text", "wanted"),
    [
        ("a.py", lines(0, 20), True), ("a/_vendor/b.py", lines(0, 20), False),
        ("a.py", "# Generated by a tool. DO NOT EDIT\n" + lines(0, 20), False), ("a.py", "x = 1\n", False),
        ("a.py", lines(0, 20) + "x" * 1001, False), ("a.py", "1, 2, 3, 4,\n" * 40, False),
        ("a.py", lines(0, 20) + "# <|im_end|>\n", False), ("a.py", lines(0, 20) + "# \ufffd\n", False),
    ],
)  # fmt: skip
def test_what_counts_as_written_by_hand(path, text, wanted):
    assert choose.written_by_hand(document(text, path)) is wanted


def test_the_held_out_split_is_by_package():
    found = {f"package-{i}": choose.held_out(f"package-{i}") for i in range(2000)}
    assert 20 < sum(found.values()) < 90
    assert found == {name: choose.held_out(name) for name in found}


def test_functions_are_found_and_others_left():
    source = FUNCTION + "\n\ndef _hidden():\n" + FUNCTION.split("\n", 1)[1] + "\n\ndef bare(x):\n    return x\n"
    (found,) = chat.functions(source)
    assert (found.name, found.arguments) == ("area", "width, height")
    assert found.summary == "Give the area of a rectangle of that width and height."
    assert found.code == FUNCTION
    assert list(chat.functions("def broken(:")) == []
    assert list(chat.functions(FUNCTION.replace("More", "<think> more"))) == []


def test_conversations_come_in_three_shapes():
    function = next(chat.functions(FUNCTION))
    texts = [chat.conversation(function, f"{number}.py") for number in range(80)]
    shapes = [(t.count("<tool_response>"), t.startswith("<|im_start|>user"), "<think>\n\n</think>" in t) for t in texts]
    assert set(shapes) == {(0, True, True), (0, True, False), (1, False, True)}
    for text, (calls, _, unthinking) in zip(texts, shapes, strict=True):
        answer = text.split("<|im_start|>assistant\n")[-1]
        if calls:
            assert answer == f"<think>\n\n</think>\n\n{function.summary}<|im_end|>\n"
            assert "<function=read_file>\n<parameter=path>\n" in text
        else:
            assert answer.endswith(f"</think>\n\n```python\n{FUNCTION}```<|im_end|>\n")
            assert unthinking == answer.startswith("<think>\n\n</think>\n\n```")


def plain(conversation: Conversation) -> str:
    segments = render(conversation, chat.FORMAT)
    return "".join(s.text if isinstance(s, PlainText) else s.name for s in segments)


@pytest.mark.parametrize("thinks", [True, False])
def test_the_template_is_what_the_server_renders(thinks):
    assert ChatFormat.of(demo_tokenizer.CHAT_TEMPLATE) == chat.FORMAT
    turns = [("system", "Be short."), ("user", " Hi "), ("assistant", "Hello."), ("tool", "42"), ("user", "More?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    template = jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined).from_string(
        demo_tokenizer.CHAT_TEMPLATE.replace("message.reasoning_content or ''", "''")
    )
    theirs = template.render(messages=messages, add_generation_prompt=True, enable_thinking=thinks)
    assert theirs == plain(Conversation([ChatMessage(*t) for t in turns], (), Thinking(on=thinks)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [lines(0, 60), FUNCTION, "Some prose, with words. Größe: 3 m².\n"] * 3
    library = demo_tokenizer.train(texts, 400)
    demo_tokenizer.write(library, folder, 4096)
    return library, folder


def test_the_tokenizer_is_one_that_the_server_loads(trained):
    library, folder = trained
    loaded = Tokenizer.load(folder)
    assert loaded is not None
    assert [loaded.special(text) for text in demo_tokenizer.SPECIAL_TOKENS] == list(range(9))
    conversation = Conversation([ChatMessage("user", "Write area(width, height)."), ChatMessage("tool", "42")])
    ids = _encode(loaded, list(render(conversation, chat.FORMAT)), 10_000)
    assert ids == library.encode(plain(conversation), add_special_tokens=False).ids


def test_bytes_of_tokens_add_up(trained):
    library, folder = trained
    sizes = demo_tokenizer.bytes_of_tokens(folder / "tokenizer.json")
    text = "<|im_start|>Größe = compute_something(1)\n"
    assert sum(sizes[i] for i in library.encode(text).ids) == len(text.encode()) - len("<|im_start|>")


def test_token_files_round_trip(tmp_path):
    for parts in ([], [[]], [[0, 65535], [], [7] * 1000]):
        path = tmp_path / "x.u16.xz"
        assert tokens.write(path, [np.array(p, np.int64) for p in parts]) == sum(map(len, parts))
        assert tokens.read(path).tolist() == [i for p in parts for i in p]


@pytest.mark.parametrize("value", [-1, 65536])
def test_ids_beyond_sixteen_bits_are_refused(tmp_path, value):
    with pytest.raises(ValueError, match="16 bits"):
        tokens.write(tmp_path / "x.u16.xz", [np.array([value])])
