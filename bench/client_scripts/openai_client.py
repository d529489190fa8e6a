"""The openai package, unchanged: sync, async, streams, lists, errors. Arguments: base URL, model, key."""

from __future__ import annotations

import asyncio
import sys

import openai

URL, MODEL, KEY = sys.argv[1:]
CHAT = [{"role": "user", "content": "Name three trees."}]
SAME = {"model": MODEL, "temperature": 0, "max_tokens": 12}


def main() -> None:
    client = openai.OpenAI(base_url=URL, api_key=KEY)
    assert MODEL in [m.id for m in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    whole = client.chat.completions.create(messages=CHAT, **SAME)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(
        messages=CHAT, stream=True, stream_options={"include_usage": True}, **SAME
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == 12
    with client.chat.completions.stream(messages=CHAT, **SAME) as events:
        assert "".join(e.delta for e in events if e.type == "content.delta") == text
    plain = client.completions.create(prompt="A tree is", logprobs=2, **SAME)
    assert len(plain.choices[0].logprobs.tokens) == 12
    pieces = client.completions.create(prompt="A tree is", stream=True, **SAME)
    assert "".join(c.choices[0].text for c in pieces) == plain.choices[0].text
    echoed = client.completions.create(prompt="A tree is", logprobs=1, echo=True, **SAME)
    assert echoed.choices[0].text == "A tree is" + plain.choices[0].text
    assert echoed.choices[0].logprobs.token_logprobs[0] is None
    vectors = client.embeddings.create(model=MODEL, input=["a tree", "a river"]).data
    floats = client.embeddings.create(model=MODEL, input="a tree", encoding_format="float").data
    assert vectors[0].embedding == floats[0].embedding
    assert len(vectors) == 2
    several = client.chat.completions.create(
        messages=CHAT, n=2, model=MODEL, max_tokens=4, seed=1, logprobs=True
    )
    assert len(several.choices) == 2
    assert len(several.choices[0].logprobs.content) == 4
    refused(client)
    asyncio.run(side_by_side(text))
    print("sync, async, streams, models, embeddings, echo, errors")


def refused(client: openai.OpenAI) -> None:
    for error, change in (
        (openai.NotFoundError, {"model": "none"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": []}),
    ):
        try:
            client.chat.completions.create(**{"messages": CHAT, **SAME, **change})
        except error as e:
            told = e.body
        else:
            raise AssertionError(f"{change} was taken")
        assert told["message"], told
        assert told["type"], told


async def side_by_side(text: str) -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY) as client:
        answers = await asyncio.gather(
            *(client.chat.completions.create(messages=CHAT, **SAME) for _ in range(8))
        )
        assert [a.choices[0].message.content for a in answers] == [text] * 8
        stream = await client.chat.completions.create(messages=CHAT, stream=True, **SAME)
        assert "".join([c.choices[0].delta.content or "" async for c in stream if c.choices]) == text


main()
