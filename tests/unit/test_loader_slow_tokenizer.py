"""Folders without a tokenizer.json: one is made of the older files, once, by a child process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from sapwood.srt.errors import ModelError
from sapwood.srt.loader import slow_tokenizer
from sapwood.srt.loader.slow_tokenizer import can_convert, convert
from tests.models import source_of, tiny_llama, tiny_tokenizer

LINES = [
    "A tree carries water from the root to the leaf.",
    "two  spaces, and a number: 1,024",
    "naïve café, 日本語, 🙂",
    "def f(x):\n\treturn x",
]


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose only tokenizer is a SentencePiece model, trained here."""
    import sentencepiece

    folder = tiny_llama(tmp_path_factory.mktemp("spm") / "m", vocab_size=600)
    (folder / "tokenizer.json").unlink()
    text = folder.parent / "text"
    text.write_text(" ".join(LINES[:2]) * 20 + Path(__file__).read_text())
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=500,
        byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.vocab").unlink()
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing may be started")

    monkeypatch.setattr(subprocess, "run", refuse)


def test_sentencepiece_is_converted_once_and_says_the_same(
    sentencepiece_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    import sentencepiece

    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path))
    source = source_of(sentencepiece_folder)
    assert source.tokenizer_file is not None
    made = Path(source.tokenizer_file)
    assert made.parent == tmp_path / "tokenizers"
    assert [p.name for p in made.parent.iterdir()] == [made.name]
    ours = Tokenizer.from_file(str(made))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    for line in LINES:
        assert ours.encode(line, add_special_tokens=False).ids == reference.encode(line), line
        assert ours.decode(ours.encode(line).ids) == line
    assert ours.encode("A tree").tokens[0] == "<s>"
    assert set(source.eos_ids) >= {ours.token_to_id("</s>")}
    request.getfixturevalue("no_child")
    assert source_of(sentencepiece_folder).tokenizer_file == str(made)
    moved = shutil.copytree(sentencepiece_folder, tmp_path / "moved")
    assert source_of(moved).tokenizer_file == str(made), "known by its content, not by its path"


def test_words_and_merges_are_converted(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
        )
    )
    made = Tokenizer.from_file(str(convert(folder, tmp_path / "cache")))
    for line in LINES:
        assert made.encode(line).ids == tiny_tokenizer().encode(line).ids, line


def test_changed_settings_or_another_transformers_make_another(
    sentencepiece_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(sentencepiece_folder, tmp_path / "m")
    before = slow_tokenizer._label(folder)
    (folder / "README.md").write_text("nothing that counts")
    assert slow_tokenizer._label(folder) == before
    with monkeypatch.context() as other:
        other.setattr(importlib.metadata, "version", lambda package: "4.0.0")
        assert slow_tokenizer._label(folder) != before
    (folder / "tokenizer_config.json").write_text("{}")
    assert slow_tokenizer._label(folder) != before


def test_the_child_sees_no_keys(
    sentencepiece_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "SAPWOOD_API_KEY", "SOME_SECRET"):
        monkeypatch.setenv(name, "secret")
    child = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[2], 'w'))"
    monkeypatch.setattr(slow_tokenizer, "_CHILD", child)
    seen = json.loads(convert(sentencepiece_folder, tmp_path).read_text())
    assert "secret" not in seen.values()
    assert seen["HF_HUB_OFFLINE"] == "1"
    assert seen["PATH"]


def test_what_can_be_converted(tmp_path: Path) -> None:
    assert not can_convert(tmp_path)
    (tmp_path / "vocab.json").touch()
    assert not can_convert(tmp_path)
    (tmp_path / "merges.txt").touch()
    assert can_convert(tmp_path)


@pytest.mark.parametrize(
    ("gone", "line"),
    [
        ({"transformers"}, "pip install transformers$"),
        ({"sentencepiece"}, "pip install sentencepiece$"),
        ({"transformers", "google.protobuf"}, "pip install transformers protobuf$"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_child: None, gone: set[str], line: str
) -> None:
    folder = tiny_llama(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"x")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else found(name))
    with pytest.raises(ModelError, match=rf"m: has no tokenizer\.json.*tokenizer\.model needs .*{line}"):
        convert(folder, tmp_path / "cache")


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"m: transformers could not make a tokenizer\.json of its files: ."):
        convert(folder, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_conversion_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentencepiece_folder: Path
) -> None:
    monkeypatch.setattr(slow_tokenizer, "SECONDS", 0.5)
    monkeypatch.setattr(slow_tokenizer, "_CHILD", "import time; time.sleep(60)")
    with pytest.raises(ModelError, match=r"within 0\.5 s"):
        convert(sentencepiece_folder, tmp_path)


def test_without_need_nothing_is_made(sentencepiece_folder: Path, no_child: None) -> None:
    options: list[dict[str, Any]] = [{"skip_tokenizer_init": True}, {"load_format": "dummy"}]
    for given in options:
        assert source_of(sentencepiece_folder, **given).tokenizer_file is None
