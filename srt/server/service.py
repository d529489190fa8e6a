"""What every route works on: the model, the client of the tokenizers, and whether requests are served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from sapwood.srt.client import Client, Prompt, Stream
from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import BadRequest, ContextTooLong, ModelNotFound, Overloaded, Unavailable
from sapwood.srt.messages import Ids, IdsPrompt, TextPrompt, pack
from sapwood.srt.names import Rid
from sapwood.srt.orders import Serve
from sapwood.srt.params import Constraint, Parsing, SamplingParams
from sapwood.srt.server import sampling
from sapwood.srt.server.tenants import Place, Tenants

if TYPE_CHECKING:
    from sapwood.srt.server.request_log import RequestLog

ANY_MODEL = "default"
MAX_CHOICES = 16_384
QUESTIONS = 64
"""At once to the tokenizer, of requests: it refuses more than a few hundred."""
QUESTION_TOKENS = 65_536
"""Of the prompts whose texts are asked for at once, without the last of them."""


class Service:
    """One model behind one client. It begins as loading; what `take` gets comes when ready."""

    def __init__(self, config: Config, source: ModelSource, client: Client) -> None:
        self.config = config
        self.source = source
        self.client = client
        self.tenants = Tenants(config)
        self.model = config.served_model_name or source.name
        self.created = int(time.time())
        self.state: Literal["loading", "ready", "draining"] = "loading"
        self.facts: dict[str, str] = {}
        self.max_request_tokens = 0
        self.trouble = ""
        """Why nothing is computed at present, though it may be again: requests wait meanwhile."""
        self.requests: RequestLog | None = None
        self.questions = asyncio.Semaphore(QUESTIONS)
        """For those that belong to requests: as many as these may be, each waits for its turn here."""

    def take(self, serve: Serve) -> None:
        """What is known only once all processes are ready."""
        self.config = self.config.on(serve.device)
        self.facts = serve.facts
        self.max_request_tokens = serve.max_request_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return self.max_request_tokens or self.source.context_length

    @property
    def hidden_size(self) -> int | None:
        """How many numbers an embedding has."""
        config = self.source.config
        size: int | None = config.get("hidden_size") or (config.get("text_config") or {}).get("hidden_size")
        return size

    @property
    def obstacle(self) -> str | None:
        """Why a request would not be served now; None if it would."""
        if self.client.failure is not None:
            return self.client.failure.message
        return None if self.state == "ready" else f"the server is {self.state}"

    def require_ready(self) -> None:
        """Raises Unavailable with the reason."""
        if (reason := self.obstacle) is not None:
            code = "process_died" if self.client.failure else self.state
            raise Unavailable(reason, code=code)

    def require_model(self, name: str | None) -> None:
        """Raises ModelNotFound, which lists what there is; no name means the one that there is."""
        if name and name not in (self.model, ANY_MODEL):
            raise ModelNotFound(
                f"the model {name[:100]!r} does not exist; there is {self.model!r} (or {ANY_MODEL!r})",
                param="model",
            )

    def submit(
        self,
        items: Sequence[tuple[Prompt, SamplingParams]],
        *,
        place: Place,
        rid: Rid,
        timeout: float | None = None,
        field: str = "prompt",
        waited: float = 0.0,
        streamed: bool = True,
        constraint: Constraint | Sequence[Constraint | None] | None = None,
        parsing: Parsing | None = None,
    ) -> list[Stream]:
        """Start the requests of one body; they get `timeout` seconds, of which `waited` are over.

        A `constraint` is for all of them, or a list with one for each. `field` is where the body has its
        prompts; if not `streamed`, nobody sees its Chunks one by one. Raises BadRequest, Conflict,
        Overloaded, Unavailable.
        """
        self.check(items, field)
        streams = self.client.submit_all(
            items, place.namespace, rid, timeout, waited, place.scheduling, streamed, constraint, parsing
        )
        if self.requests is not None:
            self.requests.submitted(streams, items)
        return streams

    def check(self, items: Sequence[tuple[Prompt, SamplingParams]], field: str) -> None:
        """Raises what `submit` raises for requests that cannot be started now."""
        self.require_ready()
        self._require_count(len(items), field)
        choices = sum(params.n for _prompt, params in items)
        if choices > MAX_CHOICES:
            raise BadRequest(
                f"one request may have at most {MAX_CHOICES} choices (prompts times n), got {choices}",
                param="n",
            )
        sampling.check_told(items, self.longest, native=field in ("text", "input_ids", "input"))
        # Counted here too: what has not reached the scheduler yet must not pile up without bound.
        limit = self.config.max_queued_requests
        room = limit + self.config.rows - self.client.live
        if len(items) > room:
            raise Overloaded(
                f"{self.client.live} requests are running or waiting; at most"
                f" {self.config.rows} run (--max-running-requests) and {limit} wait"
                " (--max-queued-requests)"
            )
        if self.config.skip_tokenizer_init and not all(isinstance(p, IdsPrompt) for p, _params in items):
            raise BadRequest(
                f"{field}: this server takes token ids only (--skip-tokenizer-init)",
                param=field,
            )

    def require_few(self, value: object, field: str) -> None:
        """Raises BadRequest if a body's prompts (see `prompts`) are too many.

        Asked before they are looked at one by one, which would hold up every stream for seconds.
        """
        if isinstance(value, list) and value and not isinstance(value[0], int):
            self._require_count(len(value), field)

    def _require_count(self, count: int, field: str) -> None:
        limit = self.config.max_queued_requests
        if not 1 <= count <= limit:
            raise BadRequest(f"{field} may hold from 1 to {limit} prompts, got {count}", param=field)

    def ids_prompt(self, ids: Sequence[int], param: str) -> IdsPrompt:
        """Token ids of a request.

        Raises BadRequest if there are none, if one is outside the vocabulary, and if they are more than any
        request may have: a body has room for a million, which would hold up every stream.
        """
        if not ids:
            raise BadRequest(f"{param} is an empty list of token ids", param=param)
        if 0 < self.max_request_tokens < len(ids):
            raise ContextTooLong(
                f"{param} has {len(ids)} tokens; the longest request has {self.max_request_tokens},"
                " prompt and output together",
                param=param,
            )
        return self.packed(ids, param)

    def packed(self, ids: Sequence[int], param: str) -> IdsPrompt:
        """Token ids, however many. Raises BadRequest if one is outside the vocabulary."""
        try:
            values = np.array(ids, dtype=np.int64)
            wrong = values[(values < 0) | (values >= self.source.vocab_size)].tolist()
        except OverflowError:
            wrong = [min(ids) if min(ids) < 0 else max(ids)]
        if wrong:
            raise BadRequest(
                f"a token id in {param} must be from 0 to {self.source.vocab_size - 1}, got {wrong[0]}",
                param=param,
            )
        return IdsPrompt(pack(values))

    def prompts(
        self, value: str | list[str | int | list[int]], param: str, add_special_tokens: bool | None = None
    ) -> list[TextPrompt | IdsPrompt]:
        """A text, a list of texts, one list of token ids, or several; only texts can get special tokens."""
        if isinstance(value, str):
            return [TextPrompt(value, add_special_tokens is not False)]
        if not value:
            raise BadRequest(f"{param} is an empty list", param=param)
        kinds = set(map(type, value))
        if kinds == {str}:
            return [TextPrompt(cast(str, text), add_special_tokens is not False) for text in value]
        if add_special_tokens:
            raise BadRequest("add_special_tokens needs text prompts", param="add_special_tokens")
        if kinds == {int}:
            return [self.ids_prompt(cast("list[int]", value), param)]
        if kinds == {list}:
            return [self.ids_prompt(cast("list[int]", ids), f"{param}[{i}]") for i, ids in enumerate(value)]
        raise BadRequest(
            f"{param} must hold only texts, only token ids, or only lists of token ids", param=param
        )

    async def texts_of(
        self, prompts: Sequence[TextPrompt | IdsPrompt], timeout: float | None = None
    ) -> list[str]:
        """The text of each prompt, of token ids with special tokens included.

        One question at a time, however many prompts. Raises what `Client.ask` raises, and DeadlineExceeded if
        that takes more than the `timeout` seconds of a request.
        """
        texts = [prompt.text if isinstance(prompt, TextPrompt) else "" for prompt in prompts]
        ids = {
            i: prompt.ids for i, prompt in enumerate(prompts) if isinstance(prompt, IdsPrompt) and prompt.ids
        }
        limit, error = self.client.time_limit(timeout)
        try:
            async with asyncio.timeout(limit):
                for part in _questions(ids):
                    lengths = [len(ids[i]) // 4 for i in part]
                    prompt = IdsPrompt(b"".join(ids[i] for i in part))
                    answer = await self.client.ask("detokenize", prompt=prompt, options={"lengths": lengths})
                    for i, text in zip(part, answer["texts"], strict=True):
                        texts[i] = text
        except TimeoutError:
            raise error from None
        return texts


def _questions(ids: Mapping[int, Ids]) -> Iterator[list[int]]:
    """The keys of `ids` in order, in parts that hold some QUESTION_TOKENS tokens."""
    part: list[int] = []
    tokens = 0
    for i, packed in ids.items():
        part.append(i)
        tokens += len(packed) // 4
        if tokens >= QUESTION_TOKENS:
            yield part
            part, tokens = [], 0
    if part:
        yield part
