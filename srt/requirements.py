"""What the runtime needs beyond the plain install, and what of it is missing."""

from __future__ import annotations

import importlib.util

from sapwood.srt.errors import ConfigError

PACKAGES = {
    "numpy": "numpy",
    "torch": "torch",
    "zmq": "pyzmq",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "llguidance": "llguidance",
    "safetensors": "safetensors",
    "prometheus_client": "prometheus-client",
}
"""Import name: the package that brings it. All are in the extra `serve`."""

HTTP_ONLY = ("fastapi", "uvicorn", "prometheus_client")


def check(http: bool = True) -> None:
    """Raise ConfigError naming what is missing and the line that installs it. Imports nothing."""
    missing = [
        package
        for name, package in PACKAGES.items()
        if (http or name not in HTTP_ONLY) and importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigError(
            f"the runtime needs {', '.join(missing)}, not installed here: "
            "pip install 'sapwood[serve]' (in a clone of the repository: pip install -e '.[serve]')",
            code="missing_packages",
        )
