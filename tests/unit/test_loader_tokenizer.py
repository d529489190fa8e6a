"""The tokenizer made from a GGUF file is the model's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.gguf_parts import GgufFile
from sapwood.srt.loader.gguf_tokenizer import build, write_tokenizer
from tests.gguf_files import tiny_gguf
from tests.models import default_source, default_tokenizer, tiny_tokenizer

TEXTS = [
    "",
    " ",
    "What is the capital of France?",
    " leading and trailing ",
    "I'm sure they'll say it's what we've DONE, isn't it? O'Neill's",
    "def f(x):\n    if x > 0:\n\t\treturn x ** 2  # square\n\n\n    return -x\r\n",
    "for (int i = 0; i < n; ++i) { a[i] <<= 3; }",
    "1 22 333 4444 55555; 3.14159, 1,000,000 and 0xFF v2.0.1",
    "x=1y=22z=333",
    "Größe, naïve café, señor, Ærøskøbing, ﬁne",
    "Съешь же ещё этих мягких французских булок",
    "日本語の文章です。中文字符。한국어 문장",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया",
    "🙂👍🏽👩‍👩‍👧‍👦🇫🇷 emoji and ☃ symbols ∑∞≠",
    "tabs\tand\u00a0no-break\u2003em spaces\u200bzero width",
    "a  b   c    d     e",
    "\n\n\n  \n \n\t\t x",
    "   \n   ",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|im_end|><repo_name>x<file_sep> <gh_stars>3",
    "<|im_start| >not special<|im_endx|>",
    "\x00\x01\x7f control",
    "e\u0301 and \u00e9 stay apart",
    "http://example.com/a?b=c&d=e#f user@example.org",
    "A" * 300,
    "aaaaaaaaaaaaaaaaaaaaab" * 20,
]
DIGITS_AFTER_SPACE = ["a  1", "½ ² ٣ Ⅷ ४", "x   42 y", "in\n    7\n", "  3"]


@pytest.fixture(scope="module")
def ours() -> Any:
    return default_tokenizer()


@pytest.fixture(scope="module")
def hugging_face() -> Any:
    from transformers import AutoTokenizer

    path = Path(default_source().path)
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer


def test_ids_are_those_of_hugging_face(ours: Any, hugging_face: Any) -> None:
    for text in TEXTS:
        assert ours.encode(text).ids == hugging_face.encode(text).ids, text
    assert ours.get_vocab() == hugging_face.get_vocab()


def test_spaces_before_a_digit_are_cut_as_the_model_was_trained(ours: Any, hugging_face: Any) -> None:
    """The GGUF says `smollm`: digits are cut out before GPT-2's rule applies, so that spaces before one stay
    together. Transformers applies GPT-2's rule alone to such a file; given the right one, it agrees."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    plain = hugging_face.pre_tokenizer
    try:
        hugging_face.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        for text in TEXTS + DIGITS_AFTER_SPACE:
            assert ours.encode(text).ids == hugging_face.encode(text).ids, text
    finally:
        hugging_face.pre_tokenizer = plain
    assert ours.encode("a  1").tokens == ["a", "ĠĠ", "1"]


def test_decoding_gives_the_text_back(ours: Any) -> None:
    for text in TEXTS:
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_marked_as_such(ours: Any) -> None:
    added = ours.get_added_tokens_decoder()
    assert len(added) == 17
    assert all(token.special for token in added.values())
    assert ours.decode(ours.encode("<|im_start|>a<|im_end|>").ids) == "a"


def test_is_made_once_and_fast(tmp_path: Path) -> None:
    path = Path(default_source().path)
    metadata = GgufFile(path).metadata
    begun = time.monotonic()
    made = write_tokenizer(metadata, path, tmp_path)
    assert time.monotonic() - begun < 2
    assert write_tokenizer({}, path, tmp_path) == made, "the second time nothing of the file is needed"
    assert [p.name for p in tmp_path.iterdir()] == [made.name], "no scratch file is left"


def test_a_changed_file_gets_a_new_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny_gguf(path)
    first = write_tokenizer(GgufFile(path).metadata, path, tmp_path)
    tiny_gguf(path, metadata={"general.name": "other"})
    assert write_tokenizer(GgufFile(path).metadata, path, tmp_path) != first


def test_the_tiny_tokenizer_survives_the_way_through_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny_gguf(path)
    made, own = build(GgufFile(path).metadata, path), tiny_tokenizer()
    for text in TEXTS:
        assert made.encode(text).ids == own.encode(text).ids, text


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny_gguf(path, metadata={"tokenizer.ggml.add_bos_token": True})
    made = build(GgufFile(path).metadata, path)
    assert made.encode("hi").ids == [1, *tiny_tokenizer().encode("hi").ids]
    assert made.encode("hi", add_special_tokens=False).ids == tiny_tokenizer().encode("hi").ids


def test_user_defined_tokens_stay_whole_but_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata = _metadata(path)
    metadata["tokenizer.ggml.tokens"][330] = "<think>"
    metadata["tokenizer.ggml.token_type"] = [3, 3, 3, *[1] * 327, 4]
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:-1]
    made = build(metadata, path)
    assert made.encode("a<think>b").tokens == ["a", "<think>", "b"]
    assert made.decode(made.encode("<think>").ids) == "<think>"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("default", "ab 1234\n\n x", ["ab", " 1234", "\n\n", " x"]),
        ("smollm", "ab 1234\n\n x", ["ab", " ", "1", "2", "3", "4", "\n\n", " x"]),
        ("llama-bpe", "ab 1234\n\n x", ["ab", " ", "123", "4", "\n\n", " x"]),
        ("qwen2", "ab 1234\n\n x", ["ab", " ", "1", "2", "3", "4", "\n\n", " x"]),
        ("deepseek-r1-qwen", "ab 12", ["ab", " ", "1", "2"]),
        ("dbrx", "ab 1234", ["ab", " ", "123", "4"]),
        ("tekken", "aBcDEf's 12 a/\n", ["a", "Bc", "DEf", "'s", " ", "1", "2", " a", "/\n"]),
        ("gpt-4o", "aBcDEf's 1234 a/\n", ["a", "Bc", "DEf's", " ", "123", "4", " a", "/\n"]),
    ],
)
def test_each_pre_tokenizer_cuts_by_its_rule(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    path = tmp_path / "m.gguf"
    made = build(_metadata(path) | {"tokenizer.ggml.pre": pre}, path)
    cut = made.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces


def test_llama_3_takes_whole_words_and_begins_with_bos(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata = _metadata(path)
    word = metadata["tokenizer.ggml.tokens"][330]
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:20]
    text = word.replace("Ġ", " ")
    made = build(metadata | {"tokenizer.ggml.pre": "llama-bpe"}, path)
    assert made.encode(text).ids == [1, 330]
    assert 330 not in build(metadata, path).encode(text).ids


def test_qwen_2_normalises_to_composed_letters(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    made = build(_metadata(path) | {"tokenizer.ggml.pre": "qwen2"}, path)
    assert made.encode("e\u0301").ids == made.encode("\u00e9").ids


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer kind 't5'.*supported: 'gpt2'.*'llama'"),
        ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer 'viking'.*supported: default, gpt-2, smollm"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["a nothing"]}, "merge 'a nothing' does not fit"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "331 tokens but 2 entries in"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelError, match=message):
        build(_metadata(path) | metadata, path)


def _metadata(path: Path) -> dict[str, Any]:
    tiny_gguf(path)
    return dict(GgufFile(path).metadata)
