"""What the language's tests share: a backend that echoes, which is the default one while a test runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sapwood.lang.backends.echo import Echo
from sapwood.lang.defaults import set_default_backend


@pytest.fixture
def echo() -> Iterator[Echo]:
    backend = Echo()
    set_default_backend(backend)
    yield backend
    set_default_backend(None)
