"""The launcher as the offline Engine uses it: no server, in a process that goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import sapwood
from sapwood.srt import child, config, launch
from sapwood.srt.errors import ConfigError, ProcessDied
from sapwood.srt.launch import Interrupted, Launcher
from sapwood.srt.lifeline import Wire
from sapwood.srt.orders import Died, Fatal
from sapwood.srt.socket_folder import SocketFolder

ROLES_FOLDER = Path(__file__).parent / "roles"
IDLE = {"tokenizer": "role_idle", "scheduler": "role_idle", "worker": "role_idle"}
SOURCE = config.ModelSource(
    name="tiny", format="dummy", path="nowhere", files=[], architecture="LlamaForCausalLM", config={},
    vocab_size=8, context_length=64, eos_ids=[0], tokenizer_file=None, chat_template=None, template_vars={},
    sampling_defaults={},
)  # fmt: skip


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setenv("PYTHONPATH", str(ROLES_FOLDER))
    with Launcher(config.make(), SOURCE, IDLE) as launcher:
        yield launcher


def children() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            if "sapwood.srt.lifeline" in process.cmdline():
                found.append(process)
    return found


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_start_watch_interrupt_close(launcher: Launcher) -> None:
    ready = launcher.start()
    assert ready.max_request_tokens == 48
    assert len(children()) == 3
    assert os.stat(launcher.directory).st_mode & 0o777 == 0o700
    threading.Timer(0.3, launcher.interrupt).start()
    with pytest.raises(Interrupted):
        launcher.watch()
    launcher.close()
    assert not children()
    assert not Path(launcher.directory).exists()
    launcher.close()


def test_a_death_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the launcher next looks up by itself."""
    monkeypatch.setenv("PYTHONPATH", str(ROLES_FOLDER))
    monkeypatch.setattr(launch, "POLL_SECONDS", 60.0)
    with Launcher(config.make(heartbeat_timeout=3600.0), SOURCE, IDLE) as launcher:
        launcher.start()
        (victim,) = [p for p in children() if "scheduler" in p.cmdline()]
        began = time.monotonic()
        victim.kill()
        with pytest.raises(ProcessDied, match=r"scheduler died: killed by signal 9 \(SIGKILL"):
            launcher.watch()
        assert time.monotonic() - began < 30.0


def test_a_launcher_that_fails_half_way_leaves_nothing(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen
    started: list[Any] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        if len(started) == 2:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", failing)
    with pytest.raises(OSError, match="temporarily unavailable"), launcher:
        launcher.start()
    assert [p.poll() is not None for p in started] == [True, True]
    assert not Path(launcher.directory).exists()


def test_a_fork_that_ends_leaves_the_processes_alone(launcher: Launcher) -> None:
    launcher.start()
    before = children()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        launcher.close()
        os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.2)
    assert children() == before


def test_a_fork_that_goes_on_does_not_keep_orphans_alive(tmp_path: Path) -> None:
    program = f"""
import os, time, sys
sys.path.insert(0, {str(ROLES_FOLDER)!r})
from sapwood.srt import config
from sapwood.srt.launch import Launcher
from launch_driver import SOURCE
launcher = Launcher(config.make(), SOURCE, {IDLE!r})
launcher.start()
if os.fork() == 0:
    time.sleep(30)
    os._exit(0)
print("started", flush=True)
time.sleep(60)
"""
    root = str(Path(sapwood.__file__).resolve().parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROLES_FOLDER), root]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        below = psutil.Process(process.pid).children(recursive=True)
        ours = [p for p in below if "sapwood.srt.lifeline" in p.cmdline()]
        (fork,) = [p for p in below if p not in ours]
        process.kill()
        deadline = time.monotonic() + 20
        while any(lives(p) for p in ours) and time.monotonic() < deadline:
            time.sleep(0.01)
        left = [p.pid for p in ours if lives(p)]
        assert lives(fork)
        fork.kill()
    assert (len(ours), left) == (3, [])


def test_a_folder_too_deep_for_sockets_is_told(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        launcher.start()
    assert not list(deep.iterdir())


def test_folders_of_killed_launchers_are_removed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    strange = tmp_path / "sapwood-mine"
    strange.mkdir()
    lives = SocketFolder()
    code = (
        "import os, signal; from sapwood.srt.socket_folder import SocketFolder; "
        "print(SocketFolder().path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = str(Path(sapwood.__file__).resolve().parent.parent)
    env = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)}
    left = Path(
        subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE).stdout.decode()[:-1]
    )
    assert left.parent == tmp_path
    assert left.exists()
    claiming, claimed = tmp_path / "sapwood-new", tmp_path / "sapwood-old"
    for folder in (claiming, claimed):
        folder.mkdir(mode=0o700)
        (folder / ".sapwood-launcher.new").touch()
    os.utime(claimed / ".sapwood-launcher.new", (1, 1))
    after = SocketFolder()
    assert not claimed.exists()
    shutil.rmtree(claiming)
    assert {p.name for p in tmp_path.iterdir()} == {Path(f.path).name for f in (lives, after)} | {
        strange.name
    }
    after.remove()
    lives.remove()
    assert list(tmp_path.iterdir()) == [strange]


def test_no_library_of_a_child_starts_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    env = child.environment()
    assert {env[n] for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"1"}


class TestWire:
    def test_messages_arrive_whole_and_in_order(self) -> None:
        ours, theirs = (Wire(s) for s in socket.socketpair())
        sent = [Died("x" * size) for size in (0, 1, 70_000, 3_000_000)]
        writer = threading.Thread(target=lambda: [ours.write(m) for m in sent])
        writer.start()
        assert [theirs.read() for _ in sent] == sent
        writer.join()
        ours.close()
        theirs.close()

    def test_the_end_is_none(self) -> None:
        ours, theirs = (Wire(s) for s in socket.socketpair())
        assert ours.write(Fatal("last words"))
        ours.hang_up()
        assert theirs.read() == Fatal("last words")
        assert theirs.read() is None
        assert not theirs.write(Died("nobody hears"))
        ours.close()
        theirs.close()

    @pytest.mark.parametrize("frame", [b"\x03\x00", b"\x04\x00\x00\x00ab", b"\x03\x00\x00\x00\xff\xff\xff"])
    def test_a_broken_frame_is_the_end(self, frame: bytes) -> None:
        one, other = socket.socketpair()
        one.sendall(frame)
        one.shutdown(socket.SHUT_RDWR)
        wire = Wire(other)
        assert wire.read() is None
        wire.close()
        one.close()


def test_signals_have_names() -> None:
    assert "SIGKILL" in child._exit(-signal.SIGKILL)
    assert child._exit(7) == "exit code 7"
