"""What is said and done at the very start: open servers are warned of, and a signal is no crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sapwood.srt import serve
from sapwood.srt.cli import command
from sapwood.srt.config import make


@pytest.mark.parametrize(
    ("options", "address", "warned"),
    [
        ({}, "127.0.0.1", False),
        ({}, "127.0.0.9", False),
        ({}, "::1", False),
        ({}, "0.0.0.0", True),
        ({}, "::", True),
        ({}, "10.1.2.3", True),
        ({}, "fe80::1%eth0", True),
        ({"admin_api_key": "a"}, "0.0.0.0", True),
        ({"api_key": "secret-1"}, "0.0.0.0", False),
    ],
)
def test_an_open_server_is_warned_of(
    options: dict[str, Any], address: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    serve._warn_if_open(make(**options), address)
    said = capsys.readouterr().err
    assert ("warning" in said and "SAPWOOD_API_KEY" in said) is warned
    assert "secret-1" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_p45_a_signal_before_anything_is_started_ends_it_with_0(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]

    def imports(_name: str) -> Any:
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr(command.importlib, "import_module", imports)
    with pytest.raises(SystemExit) as caught:
        command.main(["serve"])
    assert caught.value.code == 0
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


def test_p45_a_signal_while_serve_begins(tmp_path: Path) -> None:
    """A real process, told to end once its handlers are there (SigCgt in /proc) and before it serves."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    code = (
        "import sapwood.srt.cli.serve as s, time\n"
        "s.run = lambda parser, rest: time.sleep(60)\n"
        "from sapwood.srt.cli.command import main\n"
        "raise SystemExit(main(['serve']))"
    )
    root = Path(serve.__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    try:
        bit = 1 << (signal.SIGTERM - 1)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
            if int(caught.split()[1], 16) & bit:
                break
            time.sleep(0.01)
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
