"""OpenVINO GenAI's continuous batching behind the OpenAI API, so that `bench.serve` can ask it.

    python bench/openvino_server.py MODEL TOKENIZER --port PORT [--threads N] [--name NAME] [--cache-gb 4]
                                    [--property INFERENCE_PRECISION_HINT=f32]...

MODEL is a GGUF file or an OpenVINO folder; TOKENIZER a folder with tokenizer.json, tokenizer_config.json and
chat_template.jinja. It runs in an environment of its own, with openvino-genai, starlette, uvicorn, tokenizers
and jinja2, and imports nothing of Sapwood. The pipeline steps in a process of its own, which sends token ids
over a pipe: `step()` keeps the interpreter's lock, so with HTTP in one process streams would come in bursts.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NO_ROOM = "no room in the KV cache"


def engine(pipe: Connection, model: str, properties: dict[str, Any], cache_gb: int, eos: int) -> None:
    """The pipeline's process: takes {"id", "ids", ...} or {"cancel"}, sends [[id, new ids, finish], ...]."""
    import numpy
    import openvino  # type: ignore[import-not-found, unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = cache_gb
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 256
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    pipe.send_bytes(b"[]")
    running: dict[int, Any] = {}
    while True:
        while not running or pipe.poll():
            try:
                order = json.loads(pipe.recv_bytes())
            except EOFError:
                return
            if "cancel" in order:
                if handle := running.pop(order["cancel"], None):
                    handle.cancel()
                continue
            config = genai.GenerationConfig()
            config.max_new_tokens = order["max_tokens"]
            config.ignore_eos = order["ignore_eos"]
            config.eos_token_id = eos
            config.stop_token_ids = set() if order["ignore_eos"] else {eos}
            config.do_sample = order["temperature"] > 0
            if config.do_sample:
                config.temperature = order["temperature"]
            ids = openvino.Tensor(numpy.array([order["ids"]], dtype=numpy.int64))
            running[order["id"]] = pipeline.add_request(order["id"], ids, config)
        pipeline.step()
        if news := [new for number, handle in running.items() if (new := _read(genai, number, handle))]:
            for number, _, finish in news:
                if finish:
                    del running[number]
            pipe.send_bytes(json.dumps(news).encode())


def _read(genai: Any, number: int, handle: Any) -> tuple[int, list[int], str | None] | None:
    ids: list[int] = []
    ended = handle.get_status() != genai.GenerationStatus.RUNNING  # read first: what is there now is all
    finish = None
    while handle.can_read():
        for output in handle.read().values():
            ids += output.generated_ids
            if output.finish_reason != genai.GenerationFinishReason.NONE:
                finish = "length" if output.finish_reason == genai.GenerationFinishReason.LENGTH else "stop"
    if ended and finish is None:
        ignored = handle.get_status() == genai.GenerationStatus.IGNORED
        finish = NO_ROOM if ignored else "stop"
    return (number, ids, finish) if ids or finish else None


class Generations:
    """The HTTP process's side of the pipe: one queue of (new ids, finish) for each request."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queues: dict[int, asyncio.Queue[tuple[list[int], str | None]]] = {}
        self._last = 0

    def listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            news = json.loads(self._pipe.recv_bytes())
        except EOFError:
            raise SystemExit("the pipeline's process ended") from None
        for number, ids, finish in news:
            if number in self._queues:
                self._queues[number].put_nowait((ids, finish))

    async def generate(self, order: dict[str, Any]) -> AsyncIterator[tuple[list[int], str | None]]:
        """(new ids, finish or None) of each step, until there is a finish. Closing it cancels the request."""
        self._last += 1
        number, finish = self._last, None
        queue = self._queues[number] = asyncio.Queue()
        self._pipe.send_bytes(json.dumps({"id": number, **order}).encode())
        try:
            while finish is None:
                ids, finish = await queue.get()
                yield ids, finish
        finally:
            del self._queues[number]
            if finish is None:
                self._pipe.send_bytes(json.dumps({"cancel": number}).encode())


class Tokens:
    """Text to ids and back. Raises OSError if a file is missing."""

    def __init__(self, folder: Path) -> None:
        import jinja2.sandbox
        import tokenizers

        self._decoders = tokenizers.decoders
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._config = json.loads((folder / "tokenizer_config.json").read_text())
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string((folder / "chat_template.jinja").read_text())
        self.eos = self._tokenizer.token_to_id(self._config["eos_token"])
        self.limit = self._config["model_max_length"]

    def encode(self, body: dict[str, Any], chat: bool) -> list[int]:
        if chat:
            text = self._template.render(
                **self._config, messages=body["messages"], add_generation_prompt=True
            )
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        else:
            prompt = body["prompt"]
            ids = prompt if isinstance(prompt, list) else self._tokenizer.encode(prompt).ids
        return list(ids)

    def stream(self) -> Any:
        """A function from new ids to the text that they complete."""
        decoder = self._decoders.DecodeStream(skip_special_tokens=True)
        return lambda ids: "".join(decoder.step(self._tokenizer, i) or "" for i in ids)


class Api:
    """The endpoints that a client of the OpenAI API needs for text."""

    def __init__(self, generations: Generations, tokens: Tokens, name: str) -> None:
        self._generations, self._tokens, self._name = generations, tokens, name

    def application(self) -> Any:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        fixed = {
            "/health": {"status": "ready"},
            "/version": {"version": "openvino-genai " + version("openvino-genai")},
            "/v1/models": {"object": "list", "data": [{"id": self._name, "object": "model"}]},
        }
        routes = [Route(path, lambda request: JSONResponse(fixed[request.url.path])) for path in fixed]
        for path in ("/v1/completions", "/v1/chat/completions"):
            routes.append(Route(path, self._complete, methods=["POST"]))

        @contextlib.asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            self._generations.listen()
            yield

        return Starlette(routes=routes, lifespan=lifespan)

    async def _complete(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        body = await request.json()
        chat = request.url.path == "/v1/chat/completions"
        if ("messages" if chat else "prompt") not in body:
            return JSONResponse({"error": {"message": "no messages or no prompt", "code": 400}}, 400)
        ids = self._tokens.encode(body, chat)
        room = self._tokens.limit - len(ids)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or room
        if not ids or not 0 < limit <= room:
            message = f"{len(ids)} + {limit} tokens: at least 1 + 1 and at most {self._tokens.limit} in all"
            return JSONResponse({"error": {"message": message, "code": 400}}, 400)
        temperature = body.get("temperature")
        order = {
            "ids": ids,
            "max_tokens": limit,
            "temperature": 1.0 if temperature is None else temperature,
            "ignore_eos": bool(body.get("ignore_eos")),
        }
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(self._events(order, chat, usage), media_type="text/event-stream")
        return JSONResponse(await self._whole(order, chat))

    async def _events(self, order: dict[str, Any], chat: bool, usage: bool) -> AsyncIterator[str]:
        head = self._head("chat.completion.chunk" if chat else "text_completion")
        text_of, count = self._tokens.stream(), 0
        async for ids, finish in self._generations.generate(order):
            count += len(ids)
            text = text_of(ids)
            if finish == NO_ROOM:
                yield _event({"error": {"message": NO_ROOM, "code": 503}})
            elif text or finish:
                part = {"delta": {"content": text}} if chat else {"text": text}
                yield _event({**head, "choices": [{"index": 0, **part, "finish_reason": finish}]})
        if usage:
            yield _event({**head, "choices": [], "usage": _usage(order, count)})
        yield "data: [DONE]\n\n"

    async def _whole(self, order: dict[str, Any], chat: bool) -> dict[str, Any]:
        steps = [step async for step in self._generations.generate(order)]
        ids, finish = [i for step in steps for i in step[0]], steps[-1][1]
        if finish == NO_ROOM:
            return {"error": {"message": NO_ROOM, "code": 503}}
        text = self._tokens.stream()(ids)
        part = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        head = self._head("chat.completion" if chat else "text_completion")
        choice = {"index": 0, **part, "finish_reason": finish}
        return {**head, "choices": [choice], "usage": _usage(order, len(ids))}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{time.time_ns():x}", "object": kind, "created": int(time.time()), "model": self._name}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _usage(order: dict[str, Any], count: int) -> dict[str, int]:
    prompt = len(order["ids"])
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="a GGUF file or an OpenVINO folder")
    parser.add_argument("tokenizer", type=Path, help="a folder with the tokenizer's files")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="m", help="of the model in the API")
    parser.add_argument("--cache-gb", type=int, default=4, help="GiB of KV cache")
    parser.add_argument("--property", action="append", default=[], metavar="KEY=VALUE", help="of OpenVINO")
    args = parser.parse_args()
    import uvicorn

    tokens = Tokens(args.tokenizer)
    here, there = multiprocessing.Pipe()
    properties = {"INFERENCE_NUM_THREADS": args.threads, **dict(p.split("=", 1) for p in args.property)}
    what = (there, args.model, properties, args.cache_gb, tokens.eos)
    process = multiprocessing.get_context("spawn").Process(target=engine, args=what, daemon=True)
    process.start()
    there.close()
    here.recv_bytes()
    app = Api(Generations(here), tokens, args.name).application()
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
