"""What every route works on: the model, the client of the tokenizers, and whether requests are served."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from sapwood.srt.client import Client, Prompt, Stream
from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import BadRequest, ModelNotFound, Overloaded, Unavailable
from sapwood.srt.messages import IdsPrompt, TextPrompt, pack
from sapwood.srt.params import SamplingParams

ANY_MODEL = "default"
MAX_CHOICES = 16_384


class Service:
    """One model behind one client. It begins as loading; `facts` and `max_request_tokens` come when ready."""

    def __init__(self, config: Config, source: ModelSource, client: Client) -> None:
        self.config = config
        self.source = source
        self.client = client
        self.model = config.served_model_name or source.name
        self.created = int(time.time())
        self.state: Literal["loading", "ready", "draining"] = "loading"
        self.facts: dict[str, str] = {}
        self.max_request_tokens = 0

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
        namespace: str,
        rid: str | Sequence[str],
    ) -> list[Stream]:
        """Start the requests of one body. Raises BadRequest, Conflict, Overloaded, Unavailable."""
        self.require_ready()
        self._require_count(len(items))
        choices = sum(params.n for _prompt, params in items)
        if choices > MAX_CHOICES:
            raise BadRequest(
                f"one request may have at most {MAX_CHOICES} choices (prompts times n), got {choices}",
                param="n",
            )
        # Counted here too: what has not reached the scheduler yet must not pile up without bound.
        limit = self.config.max_queued_requests
        room = limit + self.config.max_running_requests - self.client.live
        if len(items) > room:
            raise Overloaded(
                f"{self.client.live} requests are running or waiting; at most"
                f" {self.config.max_running_requests} run (--max-running-requests) and {limit} wait"
                " (--max-queued-requests)"
            )
        for prompt, _params in items:
            if self.config.skip_tokenizer_init and not isinstance(prompt, IdsPrompt):
                raise BadRequest("this server takes token ids only (--skip-tokenizer-init)")
        return self.client.submit_all(items, namespace, rid)

    def require_few(self, value: object) -> None:
        """Raises BadRequest if a body's prompts (see `prompts`) are too many.

        Asked before they are looked at one by one, which would hold up every stream for seconds.
        """
        if isinstance(value, list) and value and not isinstance(value[0], int):
            self._require_count(len(value))

    def _require_count(self, count: int) -> None:
        limit = self.config.max_queued_requests
        if not 1 <= count <= limit:
            raise BadRequest(f"one request may hold from 1 to {limit} prompts, got {count}")

    def ids_prompt(self, ids: Sequence[int], param: str) -> IdsPrompt:
        """Token ids of a request. Raises BadRequest if there are none, or one is outside the vocabulary."""
        if not ids:
            raise BadRequest(f"{param} is an empty list of token ids", param=param)
        for worst in (min(ids), max(ids)):
            if not 0 <= worst < self.source.vocab_size:
                raise BadRequest(
                    f"a token id in {param} must be from 0 to {self.source.vocab_size - 1}, got {worst}",
                    param=param,
                )
        return IdsPrompt(pack(ids))

    def prompts(self, value: str | list[str | int | list[int]], param: str) -> list[TextPrompt | IdsPrompt]:
        """A text, a list of texts, one list of token ids, or several."""
        if isinstance(value, str):
            return [TextPrompt(value)]
        if not value:
            raise BadRequest(f"{param} is an empty list", param=param)
        texts = [v for v in value if isinstance(v, str)]
        numbers = [v for v in value if isinstance(v, int)]
        lists = [v for v in value if isinstance(v, list)]
        if len(texts) == len(value):
            return [TextPrompt(text) for text in texts]
        if len(numbers) == len(value):
            return [self.ids_prompt(numbers, param)]
        if len(lists) == len(value):
            return [self.ids_prompt(ids, f"{param}[{i}]") for i, ids in enumerate(lists)]
        raise BadRequest(
            f"{param} must hold only texts, only token ids, or only lists of token ids", param=param
        )
