from __future__ import annotations

from tests.api.conftest import http, new_server, server, shared_http, shared_server

__all__ = ["http", "new_server", "server", "shared_http", "shared_server"]
