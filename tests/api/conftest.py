from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from sapwood.srt.config import Config, ModelSource
from tests.api.scripted import Harness, client


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.close()


@pytest.fixture
def server(shared_server: Harness) -> Harness:
    """A server that no test of the module breaks."""
    shared_server.reset()
    return shared_server


@pytest.fixture
def new_server() -> Iterator[Callable[..., Harness]]:
    """Makes servers of a test's own."""
    made: list[Harness] = []

    def make(config: Config | None = None, model: ModelSource | None = None) -> Harness:
        made.append(Harness(config, model))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


@pytest.fixture(scope="module")
def shared_http(shared_server: Harness) -> Iterator[httpx.Client]:
    with client(shared_server) as shared:
        yield shared


@pytest.fixture
def http(server: Harness, shared_http: httpx.Client) -> httpx.Client:
    return shared_http


@pytest.fixture(scope="module")
def shared_ai(shared_server: Harness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def ai(server: Harness, shared_ai: openai.OpenAI) -> openai.OpenAI:
    return shared_ai
