"""litellm through its openai/ provider. Arguments: base URL, model, key."""

from __future__ import annotations

import asyncio
import sys

import litellm

URL, MODEL, KEY = sys.argv[1:]
SAME = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": 12}
CHAT = [{"role": "user", "content": "Name three trees."}]


async def side_by_side(text: str, plain: str) -> None:
    answer, other, stream = await asyncio.gather(
        litellm.acompletion(messages=CHAT, **SAME),
        litellm.atext_completion(prompt="A tree is", **{**SAME, "model": f"text-completion-openai/{MODEL}"}),
        litellm.acompletion(messages=CHAT, stream=True, **SAME),
    )
    assert answer.choices[0].message.content == text
    assert other.choices[0].text == plain
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == text


def main() -> None:
    litellm.telemetry = False
    text = litellm.completion(messages=CHAT, **SAME).choices[0].message.content
    pieces = litellm.completion(messages=CHAT, stream=True, **SAME)
    assert text
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == text
    completion = {**SAME, "model": f"text-completion-openai/{MODEL}"}
    plain = litellm.text_completion(prompt="A tree is", **completion).choices[0].text
    assert plain
    vectors = litellm.embedding(
        model=f"openai/{MODEL}", input=["a tree", "a river"], api_base=URL, api_key=KEY
    ).data
    assert len(vectors) == 2
    try:
        litellm.completion(messages=CHAT, **{**SAME, "temperature": -1})
    except litellm.BadRequestError as e:
        told = str(e)
    else:
        raise AssertionError("temperature -1 was taken")
    assert "temperature" in told, told
    asyncio.run(side_by_side(text, plain))
    print("completion, text_completion, embedding, async, streams, errors")


main()
