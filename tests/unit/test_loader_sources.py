"""Finding a model: what its files say, where they disagree, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sapwood.srt.config import make
from sapwood.srt.errors import ConfigError, ModelError
from sapwood.srt.loader import sources
from tests.gguf_files import tiny_gguf
from tests.models import CHATML, IM_END, VOCAB, default_source, source_of, tiny_llama


def edit(path: Path, **entries: Any) -> None:
    """Set entries of a JSON file; None removes one."""
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in {**old, **entries}.items() if v is not None}))


def test_the_packaged_default() -> None:
    source = default_source()
    assert source.name == "SmolLM2-135M-Instruct"
    assert source.format == "gguf"
    assert source.architecture == "LlamaForCausalLM"
    assert (source.vocab_size, source.context_length, source.eos_ids) == (49152, 8192, [2])
    assert source.chat_template is not None
    assert "<|im_start|>" in source.chat_template
    assert source.template_vars["eos_token"] == "<|im_end|>"
    assert source.sampling_defaults == {}
    assert source.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}


def test_a_folder(tmp_path: Path) -> None:
    source = source_of(tiny_llama(tmp_path / "mini"))
    assert source.name == "mini"
    assert source.format == "safetensors"
    assert source.path == str(tmp_path / "mini")
    assert source.files == [str(tmp_path / "mini/model.safetensors")]
    assert (source.vocab_size, source.context_length, source.eos_ids) == (VOCAB, 512, [IM_END])
    assert source.tokenizer_file == str(tmp_path / "mini/tokenizer.json")
    assert source.chat_template == CHATML
    assert source.template_vars == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "cache"))
    tiny_gguf(
        tmp_path / "mini.q8.gguf",
        kind="q8_0",
        metadata={"tokenizer.ggml.eot_token_id": 0, "tokenizer.chat_template": CHATML},
    )
    source = source_of(tmp_path / "mini.q8.gguf")
    assert source.name == "mini.q8"
    assert (source.vocab_size, source.context_length, source.eos_ids) == (VOCAB, 512, [IM_END, 0])
    assert source.chat_template == CHATML
    assert source.template_vars == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert source.tokenizer_file is not None
    assert Path(source.tokenizer_file).parent == tmp_path / "cache/tokenizers"
    assert source_of(tmp_path / "mini.q8.gguf", skip_tokenizer_init=True).tokenizer_file is None


def test_the_served_name_can_be_chosen(tmp_path: Path) -> None:
    assert source_of(tiny_llama(tmp_path / "mini"), served_model_name="m").name == "m"


def test_dummy_needs_the_config_alone(tmp_path: Path) -> None:
    tiny_llama(tmp_path, weights=False, tokenizer=False)
    source = source_of(tmp_path, load_format="dummy")
    assert (source.format, source.files, source.tokenizer_file) == ("dummy", [], None)
    tiny_llama(tmp_path, weights=False)
    assert source_of(tmp_path, load_format="dummy").tokenizer_file == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (None, [5, 7], None, {5, 7}),  # in generation_config only, as a list (P18)
        (None, None, "<|im_end|>", {2}),  # in the tokenizer only
        (0, [5, 7], "<|im_end|>", {0, 5, 7, 2}),  # different ones in all three (P50)
        ([2, 5], 2, "<|im_end|>", {2, 5}),
        (5, VOCAB + 3, {"content": "<|endoftext|>", "lstrip": False}, {5, 0}),  # none beyond the vocabulary
        (-1, [True, "x", 6], "<|nonsense|>", {6}),
    ],
)
def test_every_eos_counts(
    tmp_path: Path, config: Any, generation: Any, tokenizer: Any, expected: set[int]
) -> None:
    tiny_llama(tmp_path, eos_token_id=config, generation={"eos_token_id": generation})
    edit(tmp_path / "tokenizer_config.json", eos_token=tokenizer)
    eos = source_of(tmp_path).eos_ids
    assert set(eos) == expected
    assert len(eos) == len(expected)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}, None),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 50}, {}),
        ({"top_k": 0}, {"top_k": 0}),  # off, as in a request (P14)
        ({"top_k": -1, "temperature": 0}, {"top_k": -1, "temperature": 0.0}),
        ({"top_k": 50.0}, {"top_k": 50}),
        ({"temperature": "hot", "top_p": 1.5, "top_k": 1.5, "min_p": None, "repetition_penalty": 0}, {}),
        ({"temperature": True, "top_p": 0, "top_k": -2}, {}),
        ({"temperature": 10**400, "top_k": 10**400, "repetition_penalty": 1e-320}, {}),
        ({"max_new_tokens": 7, "_from_model_config": True}, {}),
        (None, {}),
    ],
)
def test_sampling_defaults(tmp_path: Path, generation: Any, expected: Any) -> None:
    source = source_of(tiny_llama(tmp_path, generation=generation))
    assert source.sampling_defaults == (generation if expected is None else expected)


def test_the_chat_template_of_a_file_of_its_own_wins(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert source_of(tmp_path).chat_template == CHATML
    edit(tmp_path / "tokenizer_config.json", chat_template=None)
    assert source_of(tmp_path).chat_template == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert source_of(tmp_path).chat_template == "from jinja"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "only", "template": "o"}], "o"),
        ([{"name": "a", "template": "a"}, {"name": "b", "template": "b"}], None),
        (None, None),
        (5, None),
    ],
)
def test_named_chat_templates(tmp_path: Path, given: Any, expected: str | None) -> None:
    tiny_llama(tmp_path)
    edit(tmp_path / "tokenizer_config.json", chat_template=given)
    assert source_of(tmp_path).chat_template == expected


def test_template_words_without_tokenizer_settings_come_from_the_ids(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert source_of(tmp_path).template_vars == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    source = source_of(tmp_path)
    assert source.template_vars == {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    assert set(source.eos_ids) == {0, 2}


def test_the_context_length_is_bounded_by_the_model(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    assert source_of(tmp_path, context_length=100).context_length == 100
    assert source_of(tmp_path, context_length=512).context_length == 512
    with pytest.raises(ConfigError, match=r"--context-length 513 .* 512 tokens"):
        source_of(tmp_path, context_length=513)
    for silly in (1, 0, -1, 10**9):
        with pytest.raises(ConfigError, match=f"context-length must be from 2 to .*, got {silly}"):
            source_of(tmp_path, context_length=silly)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; .*LlamaForCausalLM"),
        ({"architectures": None}, "names no `architectures`; supported: .*LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"hidden_act": "gelu"}, "mini: the model's config has hidden_act 'gelu'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4, not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope_type 'ntk'; supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor = None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor that turns 8 of 16"),
        ({"max_position_embeddings": None}, "max_position_embeddings = None"),
    ],
)
def test_a_config_that_cannot_be_served_names_the_key(
    tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    tiny_llama(tmp_path / "mini")
    edit(tmp_path / "mini/config.json", **entries)
    with pytest.raises(ModelError, match=message):
        source_of(tmp_path / "mini")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_pickled_weights_are_never_loaded(tmp_path: Path, suffix: str) -> None:
    folder = tiny_llama(tmp_path / "m", weights=False)
    pickled = folder / f"model{suffix}"
    pickled.write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    for given in (folder, pickled):
        with pytest.raises(ModelError, match=rf"model\{suffix}: pickled weights .* never loaded"):
            source_of(given)


def test_safetensors_beside_pickled_weights_are_taken(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert source_of(tmp_path).files == [str(tmp_path / "model.safetensors")]


def test_shards_and_an_index_that_lies(tmp_path: Path) -> None:
    tiny_llama(tmp_path, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    assert len(source_of(tmp_path).files) == 3
    given = json.loads(index.read_text())["weight_map"]
    for name, message in [
        ("gone.safetensors", r"gone\.safetensors: is missing, but model\.safetensors\.index\.json names it"),
        ("../other/m.safetensors", r"names the file '\.\./other/m\.safetensors'"),
        ("pytorch_model.bin", "pickled weights"),
    ]:
        edit(index, weight_map={**given, "model.norm.weight": name})
        with pytest.raises(ModelError, match=message):
            source_of(tmp_path)
    edit(index, weight_map=[1])
    with pytest.raises(ModelError, match="has no `weight_map`"):
        source_of(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors: is missing"):
        source_of(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors: is missing, but model-00001"):
        source_of(tmp_path)


def test_folders_without_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        source_of(tmp_path)
    tiny_llama(tmp_path, weights=False)
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        source_of(tmp_path)
    tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"to serve the GGUF in it, give .*m\.gguf"):
        source_of(tmp_path)
    tiny_llama(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json, nor .*--skip-tokenizer-init"):
        source_of(tmp_path)
    assert source_of(tmp_path, skip_tokenizer_init=True).tokenizer_file is None


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_damaged_json_names_its_file(tmp_path: Path, name: str, content: bytes) -> None:
    tiny_llama(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        source_of(tmp_path)


def test_names_that_are_no_path(tmp_path: Path) -> None:
    for name in (
        "nothing",
        "./org/model",
        "/org/model",
        "~/org/model",
        "org/sub/model",
        "org/.model",
        "a b/c",
    ):
        with pytest.raises(ModelError, match=r"is no folder or file here, no packaged model .*no hub id"):
            sources.resolve(make(model_path=name))
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"is no \.gguf file; for safetensors give the folder"):
        source_of(tmp_path / "x.safetensors")


def test_a_folder_wins_over_a_packaged_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path / "gemma-3-270m")
    tiny_llama(tmp_path / "org/name")
    monkeypatch.chdir(tmp_path)
    for name in ("gemma-3-270m", "org/name"):
        assert sources.resolve(make(model_path=name)).path == str(tmp_path / name)


def test_a_chat_template_of_the_users(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m")
    mine = tmp_path / "mine.jinja"
    mine.write_text("{{ messages | length }} ü", "utf-8")
    assert source_of(tmp_path / "m", chat_template=str(mine)).chat_template == "{{ messages | length }} ü"
    mine.write_text("")
    assert source_of(tmp_path / "m", chat_template=str(mine)).chat_template == ""
    mine.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"--chat-template .*mine\.jinja: is not UTF-8"):
        source_of(tmp_path / "m", chat_template=str(mine))
    for given, why in [(tmp_path / "none", "No such file"), (tmp_path, "Is a directory")]:
        with pytest.raises(ConfigError, match=f"--chat-template .*: cannot be read: {why}"):
            source_of(tmp_path / "m", chat_template=str(given))


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 512),
    ],
)
def test_some_encodings_reach_beyond_the_configs_length(
    tmp_path: Path, scaling: dict[str, Any], longest: int
) -> None:
    tiny_llama(tmp_path, rope_scaling=scaling)
    assert source_of(tmp_path).context_length == 512
    assert source_of(tmp_path, context_length=longest).context_length == longest
    with pytest.raises(ConfigError, match=f"--context-length {longest + 1} .* {longest} tokens"):
        source_of(tmp_path, context_length=longest + 1)


@pytest.mark.parametrize(
    ("template", "kind", "expected"),
    [
        ("{{ x }}<|im_end|>", 3, {2, 5}),
        ("{{ x }}", 3, {5}),  # the template ends no turn with it
        ("{{ x }}<|im_end|>", 1, {5}),  # no control token
        (None, 3, {5}),
    ],
)
def test_a_gguf_ends_where_its_template_ends_a_turn(
    tmp_path: Path, template: str | None, kind: int, expected: set[int]
) -> None:
    metadata = {
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.token_type": [3, 3, kind, *[1] * (VOCAB - 3)],
        "tokenizer.chat_template": template,
    }
    tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    assert set(source_of(tmp_path / "m.gguf", skip_tokenizer_init=True).eos_ids) == expected


def test_a_gguf_recommends_sampling(tmp_path: Path) -> None:
    metadata = {f"general.sampling.{k}": v for k, v in {"temp": 0.5, "top_k": 20, "top_p": 2.0}.items()}
    tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    found = source_of(tmp_path / "m.gguf", skip_tokenizer_init=True).sampling_defaults
    assert found == {"temperature": 0.5, "top_k": 20}


def test_a_load_format_that_does_not_fit(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    tiny_gguf(tmp_path / "m.gguf")
    for path, given in [
        (tmp_path, "gguf"),
        (tmp_path / "m.gguf", "safetensors"),
        (tmp_path / "m.gguf", "dummy"),
    ]:
        with pytest.raises(ConfigError, match=f"--load-format {given} needs a"):
            source_of(path, load_format=given)
    with pytest.raises(ConfigError, match="--load-format dummy needs --model-path"):
        sources.resolve(make(load_format="dummy"))


def test_finding_a_model_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "folder")
    tiny_gguf(tmp_path / "m.gguf")
    code = f"""
import os, sys
os.environ["SAPWOOD_CACHE"] = {str(tmp_path / "cache")!r}
from sapwood.srt.config import make
from sapwood.srt.loader import sources
for path in {[str(tmp_path / "folder"), str(tmp_path / "m.gguf")]!r}:
    sources.resolve(make(model_path=path))
print([m for m in ("torch", "transformers", "safetensors") if m in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
