"""Sampling parameters as vLLM's users write them: `sapwood.SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sapwood.srt import params
from sapwood.srt.errors import BadRequest

_NO_LIMIT = 2**31 - 1
"""Longer than any context: an answer is cut at the context's end anyway."""

_ONLY_DEFAULT: dict[str, str] = {
    "bad_words": "logit_bias with -100 for a token does nearly the same",
    "allowed_token_ids": "logit_bias with 100 for each of them does nearly the same",
    "logits_processors": "they would have to run in another process; logit_bias and the penalties are there",
    "truncate_prompt_tokens": "cut prompt_token_ids instead",
    "spaces_between_special_tokens": "tokens are joined as the model's tokenizer says",
}
_LLM_ONLY: dict[str, str] = {
    "logprobs": "return_logprob=True and top_logprobs_num",
    "prompt_logprobs": "return_logprob=True and logprob_start_len=0",
    "include_stop_str_in_output": "meta_info['finish_reason']['matched'], the stop string that was found",
    "detokenize": "output_ids",
}
_NATIVE_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_CONSTRAINTS = ("structured_outputs", "guided_decoding")
_NOT_OF_THE_SAMPLER = {"best_of", *_CONSTRAINTS, *_ONLY_DEFAULT, *_LLM_ONLY}


class StructuredOutputsParams(msgspec.Struct, kw_only=True):
    """What an output must be: exactly one of the first six. Names and meanings are vLLM's.

    `json` is a JSON schema (a dict or its text) or a class that has `model_json_schema`, `grammar` an EBNF
    grammar, `structural_tag` a dict or its text. The others say what is so anyway.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class GuidedDecodingParams(StructuredOutputsParams, kw_only=True):
    """The older name."""

    backend: str | None = None


class SamplingParams(msgspec.Struct, kw_only=True):
    """How one prompt's tokens are drawn and when they end; names, meanings and defaults are vLLM's.

    `max_tokens` is 16 unless it says otherwise; None goes on to the context's end. `temperature` 0 is greedy;
    `top_k` 0 and -1 are off. `stop` is one string or several, `stop_regex` (an extension) one pattern or
    several. `logprobs` is the number of alternatives for each output token (0 to 20), `prompt_logprobs` for
    each prompt token. Without a `seed`, or with -1, one is drawn. What cannot be done here raises BadRequest,
    naming the parameter and what to use instead.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: Any = None
    structured_outputs: Any = None
    """StructuredOutputsParams, or a dict of them."""
    guided_decoding: Any = None
    """The older name of `structured_outputs`."""
    truncate_prompt_tokens: int | None = None
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        for name in _CONSTRAINTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, (StructuredOutputsParams, Mapping)):
                raise BadRequest(
                    f"{name} must be StructuredOutputsParams or a dict of them, got {type(value).__name__}",
                    param=name,
                )
        for name, instead in _ONLY_DEFAULT.items():
            if not self._is_default(name):
                raise BadRequest(f"{name} is not supported: {instead}", param=name, code="unsupported")
        if self.best_of not in (None, self.n):
            raise BadRequest(
                f"best_of must equal n, which is {self.n}, got {self.best_of}: choices are not ranked",
                param="best_of",
            )
        for name in ("stop_token_ids", "stop_regex"):
            if self.include_stop_str_in_output and getattr(self, name):
                raise BadRequest(
                    f"include_stop_str_in_output works with stop, not with {name}",
                    param="include_stop_str_in_output",
                )

    def checked(self, vocab_size: int) -> params.SamplingParams:
        """The runtime's own parameters. Raises BadRequest naming the parameter, its value and the limit."""
        self._refuse()  # again: they may have been changed since
        values = self._given()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= params.MAX_TOP_LOGPROBS:
                raise BadRequest(
                    f"{name} must be from 0 to {params.MAX_TOP_LOGPROBS}, got {value}", param=name
                )
        asked = [k for k in (self.logprobs, self.prompt_logprobs) if k is not None]
        values["logprobs"] = max(asked) if asked else None
        values["logprob_start"] = None if self.prompt_logprobs is None else 0
        try:
            return msgspec.convert(values, params.SamplingParams).check(vocab_size)
        except msgspec.ValidationError as e:
            raise BadRequest(str(e)) from None

    def native(self) -> dict[str, Any]:
        """The same under the names of `/generate`; raises BadRequest for what is said otherwise there."""
        self._refuse()
        for name, instead in _LLM_ONLY.items():
            if not self._is_default(name):
                raise BadRequest(f"{name} is for LLM; here use {instead}", param=name)
        values = {_NATIVE_NAMES.get(name, name): value for name, value in self._given().items()}
        if self.max_tokens is None:
            values["max_new_tokens"] = _NO_LIMIT
        return {**values, **self.constraint}

    @property
    def constraint(self) -> dict[str, Any]:
        """The fields of `/generate` that constrain the output. Raises BadRequest."""
        self._refuse()  # again: they may have been changed since
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if not given:
            return {}
        if len(given) > 1:
            raise BadRequest(f"{given[0]} and {given[1]} are two names of the same", param=given[1])
        value = getattr(self, given[0])
        fields = dict(value) if isinstance(value, Mapping) else msgspec.structs.asdict(value)
        fields.pop("backend", None)
        schema: Any = fields.get("json")
        if hasattr(schema, "model_json_schema"):
            fields["json"] = schema.model_json_schema()
        kept = {name: its for name, its in fields.items() if its is not None and its is not False}
        return {"structured_outputs": kept}

    def _given(self) -> dict[str, Any]:
        """What the sampler and the end of an answer need, without Nones."""
        values = {
            name: value
            for name in self.__struct_fields__
            if name not in _NOT_OF_THE_SAMPLER and (value := getattr(self, name)) is not None
        }
        for name in ("stop", "stop_regex"):
            if isinstance(value := getattr(self, name), str):
                values[name] = [value]
        if self.seed == -1:
            del values["seed"]
        return values

    def _is_default(self, name: str) -> bool:
        default = self.__struct_defaults__[self.__struct_fields__.index(name)]
        value = getattr(self, name)
        return bool(value == default) or (default is None and value in ([], ()))
