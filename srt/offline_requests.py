"""Requests of the offline doors: checked as over HTTP, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from sapwood.srt import messages, params
from sapwood.srt.client import Prompt
from sapwood.srt.errors import BadRequest
from sapwood.srt.llm_params import SamplingParams
from sapwood.srt.messages import ChatPrompt, PartsPrompt, TextPart, TextPrompt
from sapwood.srt.offline_work import Call, Work
from sapwood.srt.params import Constraint
from sapwood.srt.server import constraints, generation
from sapwood.srt.server.chat_prompt import prompt_of
from sapwood.srt.server.demands import Demands, of_offline_chat
from sapwood.srt.server.native_protocol import GenerateRequest, NativeSampling
from sapwood.srt.server.protocol import ChatRequest
from sapwood.srt.server.service import Service
from sapwood.srt.server.tenants import Place, PlaceFields
from sapwood.srt.server.tools import wanted

T = TypeVar("T")

Sampling = dict[str, Any] | SamplingParams | None

_SYNONYMS = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


def generate(service: Service, values: dict[str, Any], sampling: Sampling | list[Sampling]) -> Call:
    """A call to go on with bare prompts; `values` are fields of `/generate`. Raises BadRequest."""
    body = convert(values, GenerateRequest)
    return _call(service, body, generation.prompts(service, body), sampling)


def chat(service: Service, values: dict[str, Any], chat: dict[str, Any], sampling: Sampling) -> Call:
    """A call to answer a chat; `chat` are fields of a chat request. Raises BadRequest."""
    body = convert(chat, ChatRequest)
    call = _call(service, convert(values, GenerateRequest), [_prompt_of(service, body)], sampling)
    demands = [of_offline_chat(service, body, each.constraint) for each in call.demands]
    return call._replace(demands=demands)


def chat_of(
    service: Service, fields: dict[str, Any], constraint: Constraint | None = None
) -> tuple[ChatPrompt, Demands]:
    """The prompt of a chat request's fields, and what a constraint comes to in it. Raises BadRequest."""
    body = convert(fields, ChatRequest)
    return _prompt_of(service, body), of_offline_chat(service, body, constraint)


def _prompt_of(service: Service, body: ChatRequest) -> ChatPrompt:
    for i, tool in enumerate(body.tools or ()):
        if tool.function.strict:
            raise BadRequest(
                f"tools[{i}].function.strict cannot be enforced here: calls are text, and any text is free",
                param=f"tools[{i}].function.strict",
            )
    return prompt_of(
        service,
        body.messages,
        body.add_generation_prompt,
        body.continue_final_message,
        body.chat_template_kwargs,
        wanted(body.tools),
    )


def score(
    service: Service, prompt: Any, choices: Sequence[Any], fields: Mapping[str, Any]
) -> GenerateRequest:
    """A request for the logprobs of `choices` after a text or token ids; `fields` are others of `/generate`.
    Raises BadRequest."""
    where = "text" if isinstance(prompt, str) else "input_ids"
    return scored(service, {**fields, where: prompt, "score": choices})


def scored(service: Service, values: dict[str, Any]) -> GenerateRequest:
    """A request for logprobs of choices; `values` are fields of `/generate`. Raises BadRequest."""
    body = convert(values, GenerateRequest)
    for one in generation.prompts(service, body):
        check_encodable(one)
    check_encodable(PartsPrompt([TextPart(choice) for choice in body.score or () if isinstance(choice, str)]))
    return body


def native(given: Sampling) -> dict[str, Any]:
    """Sampling parameters under the names of `/generate`; raises BadRequest if one is given twice."""
    if isinstance(given, SamplingParams):
        return given.native()
    if given is not None and not isinstance(given, dict):
        raise BadRequest(
            f"sampling_params must be a dict or SamplingParams, got {type(given).__name__}",
            param="sampling_params",
        )
    spelled: dict[str, Any] = {}
    for name, value in (given or {}).items():
        name = _SYNONYMS.get(name, name)
        if name in spelled:
            raise BadRequest(f"{name} is given twice", param=name)
        spelled[name] = value
    return spelled


def check_encodable(prompt: Prompt) -> None:
    """Raise BadRequest for what cannot be sent to another process."""
    try:
        messages.encode([prompt])
    except UnicodeEncodeError:
        raise BadRequest("a text has a lone surrogate") from None
    except (TypeError, OverflowError) as e:
        raise BadRequest(f"a chat message holds what JSON cannot: {e}") from None


def one_prompt(service: Service, prompt: Any, add_special_tokens: bool = True) -> Prompt:
    """A text, token ids, or a chat's messages. Raises BadRequest."""
    found: Prompt
    if isinstance(prompt, str):
        found = TextPrompt(prompt, add_special_tokens)
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        found, _ = chat_of(service, {"messages": prompt})
    else:
        found = service.ids_prompt(convert(prompt, list[int], "prompt"), "prompt")
    check_encodable(found)
    return found


def is_list(prompt: Any) -> bool:
    """Whether this is several prompts (texts or lists of token ids), and not one."""
    return isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))


def embedding(service: Service, prompt: Any, pooling: str | None, fields: Mapping[str, Any]) -> list[Work]:
    """The work of embedding one prompt or a list of them; `fields` say their place. Raises BadRequest."""
    prompts = [one_prompt(service, one) for one in (prompt if is_list(prompt) else [prompt])]
    checked, where = pooled(service, pooling), place(service, **fields)
    return [Work(one, checked, where) for one in prompts]


def place(service: Service, **fields: Any) -> Place:
    """Where a request goes that says these fields of PlaceFields. Raises BadRequest."""
    return service.tenants.place(convert(fields, PlaceFields))


def pooled(service: Service, pooling: str | None) -> params.SamplingParams:
    """The parameters that ask for a prompt's hidden state. Raises BadRequest."""
    values = {"max_tokens": 0, "pooling": pooling or service.config.pooling}
    return convert(values, params.SamplingParams).check(service.source.vocab_size)


def constraint(service: Service, given: SamplingParams) -> Constraint | None:
    """The constraint of the parameters. Raises BadRequest."""
    fields = convert({**given.constraint, "max_new_tokens": given.max_tokens}, NativeSampling)
    whitespace = service.config.json_whitespace
    return constraints.read(fields, whitespace=whitespace, max_tokens=given.max_tokens)


def _call(
    service: Service, body: GenerateRequest, prompts: Sequence[Prompt], sampling: Sampling | list[Sampling]
) -> Call:
    if body.score is not None:
        raise BadRequest("score draws nothing: Engine.score answers it", param="score")
    for prompt in prompts:
        check_encodable(prompt)
    if isinstance(sampling, (list, tuple)):
        body.sampling_params = [convert(native(one), NativeSampling) for one in sampling]
    else:
        body.sampling_params = convert(native(sampling), NativeSampling)
    checked = generation.sampling_params(body, len(prompts), service.source.vocab_size)
    demands = generation.demands(body, len(prompts), service.config.json_whitespace)
    return Call(body, prompts, checked, _names(body.rid, len(prompts)), demands)


def _names(rid: str | list[str] | None, count: int) -> list[str] | None:
    """A name for each prompt. One name for several prompts is told apart by a number."""
    if rid is None:
        return None
    if isinstance(rid, str):
        rid = [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]
    return [*generation.names(rid, count)]


def convert(values: Any, kind: type[T], param: str | None = None) -> T:
    """Plain values as the struct that a body is; raises BadRequest, naming `param`."""
    try:
        return msgspec.convert(values, kind, str_keys=True)  # as JSON has them: {"5": 1.0} too
    except msgspec.ValidationError as e:
        raise BadRequest(f"{param}: {e}" if param else str(e), param=param) from None
