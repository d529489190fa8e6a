"""The examples of docs/language.md run as they stand, and so do other pages' programs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sapwood as sgl
from tests.serving import Server, serve

ROOT = Path(__file__).resolve().parent.parent.parent
URL = "http://127.0.0.1:30000"


def blocks(text: str) -> list[tuple[int, str]]:
    """The Python examples of a page, each with the number of the line before it."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start()) + 1, match.group(1)) for match in found]


PAGE = (ROOT / "docs" / "language.md").read_text()
BLOCKS = blocks(PAGE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(None, tmp_path_factory.mktemp("docs")) as running:
        yield running


@pytest.fixture(autouse=True)
def backend(server: Server) -> Iterator[None]:
    server.post("/flush_cache", {})
    sgl.set_default_backend(sgl.RuntimeEndpoint(server.url))
    yield
    sgl.set_default_backend(None)


def run(line: int, source: str, server: Server) -> None:
    """Runs an example after what all of them assume. Its errors name its line of the page."""
    lines = "\n" * (line - 1) + "import asyncio, sapwood as sgl\n" + source.replace(URL, server.url)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(lines, "language.md", "exec", dont_inherit=True), names)


@pytest.mark.parametrize(("line", "source"), BLOCKS, ids=[f"line-{line}" for line, _ in BLOCKS])
def test_an_example_runs(server: Server, line: int, source: str) -> None:
    run(line, source, server)


def test_there_are_as_many_examples_as_topics_that_need_one() -> None:
    """A block that is fenced otherwise is not run."""
    assert len(BLOCKS) == PAGE.count("\n```python\n") == PAGE.count("\n```") / 2
    topics = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    without = [topic.splitlines()[0] for topic in topics if "```python" not in topic]
    assert without == ["Where we differ from SGLang"]


def test_every_public_name_is_told_of() -> None:
    names = [name for name, module in sgl._PUBLIC.items() if module.startswith("sapwood.lang.")]
    ends = re.compile("(system|user|assistant)_(begin|end)")
    missing = [name for name in names if name not in PAGE and not ends.fullmatch(name)]
    assert missing == []
    assert "`_begin`" in PAGE
    assert "`_end`" in PAGE


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_program_of_another_page_runs(server: Server, page: str) -> None:
    programs = [block for block in blocks((ROOT / page).read_text()) if "@sgl.function" in block[1]]
    assert len(programs) == 1
    run(*programs[0], server)


def test_links_within_the_page_lead_somewhere() -> None:
    heads = re.findall(r"^##+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 _-]", "", head.lower()).replace(" ", "-") for head in heads}
    links = re.findall(r"\]\(#([^)]*)\)", PAGE)
    assert set(links) <= anchors
    for page, anchor in re.findall(r"\]\((\w+\.md)#([^)]*)\)", PAGE):
        other = (ROOT / "docs" / page).read_text()
        heads = re.findall(r"^##+ (.*)$", other, re.MULTILINE)
        assert anchor in {re.sub(r"[^a-z0-9 _-]", "", h.lower()).replace(" ", "-") for h in heads}, anchor
