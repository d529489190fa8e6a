"""What the tests of whole processes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.launching import Serving


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(roles: dict[str, str] | None = None, env: dict[str, str] | None = None, **more: Any) -> Serving:
        started.append(Serving(tmp_path, roles=roles or {}, env=env or {}, more=more))
        return started[-1]

    yield start
    for serving in started:
        for process in serving.alive():
            process.kill()
        serving.exit_code()
