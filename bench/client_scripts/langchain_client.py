"""langchain-openai: chat, completions, embeddings. Arguments: base URL, model, key."""

from __future__ import annotations

import asyncio
import sys

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

URL, MODEL, KEY = sys.argv[1:]
SAME = {"model": MODEL, "base_url": URL, "api_key": KEY}
PROMPTS = ["Name three trees.", "Name three rivers.", "Hello!"]


async def side_by_side(chat: ChatOpenAI, texts: list[str]) -> None:
    assert [m.content for m in await chat.abatch(PROMPTS)] == texts
    assert "".join([m.content async for m in chat.astream(PROMPTS[0])]) == texts[0]


def main() -> None:
    chat = ChatOpenAI(temperature=0, max_tokens=12, **SAME)
    first = chat.invoke([("system", "You are brief."), ("human", PROMPTS[0])])
    assert first.content
    assert first.usage_metadata["output_tokens"] == 12
    texts = [m.content for m in chat.batch(PROMPTS)]
    assert "".join(m.content for m in chat.stream(PROMPTS[0])) == texts[0]
    completion = OpenAI(temperature=0, max_tokens=12, **SAME)
    plain = completion.invoke("A tree is")
    assert plain
    assert "".join(completion.stream("A tree is")) == plain
    embeddings = OpenAIEmbeddings(check_embedding_ctx_length=False, **SAME)
    listed = embeddings.embed_documents(["a tree", "a river"])
    assert listed[0] == embeddings.embed_query("a tree")
    assert len(listed) == 2
    asyncio.run(side_by_side(chat, texts))
    print("ChatOpenAI invoke, stream, batch, async; OpenAI; OpenAIEmbeddings")


main()
