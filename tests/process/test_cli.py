"""The `sapwood` command: what it answers, what it refuses, and with which exit code."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

import sapwood
from sapwood.srt import cli
from tests.models import tiny_llama

ROOT = Path(sapwood.__file__).resolve().parent.parent
SHORT = ["--max-tokens", "8", "--temperature", "0", "--max-total-tokens", "512"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return str(folder)


def start(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "sapwood.srt.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refusal prints."""
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sapwood: error: ")
    assert said.err.count("\n") == 1, said.err
    return said.err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"sapwood {sapwood.__version__}\n"
    for arguments in (["--version"], ["--help"], ["serve", "--help"], ["generate", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
    assert "--chunked-prefill-size" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["serv"], ["serve", "--port", "http"]])
def test_what_argparse_refuses_has_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: sapwood" in capsys.readouterr().err


def test_a_wrong_value_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--context-length must be from 2 to 16777216, got 1" in refused(
        capsys, "serve", "--context-length", "1"
    )
    assert "two models: 'a' and --model-path 'b'" in refused(capsys, "serve", "a", "--model-path", "b")
    assert "--system needs the chat template" in refused(capsys, "generate", "x", "--raw", "--system", "y")
    nowhere = str(tmp_path / "nowhere")
    assert nowhere in refused(capsys, "serve", nowhere, "--port", "0")
    assert nowhere in refused(capsys, "generate", "x", "--model-path", nowhere)


def test_an_environment_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAPWOOD_PORT", "70000")
    assert "--port must be from 0 to 65535, got 70000" in refused(capsys, "serve")


def test_generate_streams_or_waits_for_the_same_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    def generated(*arguments: str) -> str:
        assert cli.main(["generate", "--model-path", model, *SHORT, *arguments]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    chat = generated("A river is")
    assert chat.endswith("\n")
    assert len(chat) > 1
    monkeypatch.setattr("sys.stdin", io.StringIO("A river is"))
    assert generated("-", "--no-stream") == chat
    raw = generated("A river is", "--raw")
    assert raw != chat
    assert generated("A river is", "--raw", "--stop", raw[1:3]) == raw[:1] + "\n"


def test_a_wrong_sampling_flag_has_exit_code_2(capsys: pytest.CaptureFixture[str], model: str) -> None:
    text = refused(capsys, "generate", "x", "--model-path", model, "--temperature", "-1")
    assert "temperature must be from 0.0 to 100.0, got -1.0" in text


def test_serve_answers_and_ends(model: str) -> None:
    with start("serve", model, "--port", "0", "--max-total-tokens", "512") as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            while "scheduling" not in lines[-1]:
                lines.append(process.stdout.readline())
                assert lines[-1] or process.poll() is None, (lines, process.communicate())
            url = lines[1].split()[1]
            (kernels,) = [line for line in lines if line.split()[0] == "kernels"]
            assert os.environ.get("SAPWOOD_CPU_ISA", "") in kernels
            assert httpx.get(f"{url}/health").status_code == 200
            body = {"text": "A river", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
            answer = httpx.post(f"{url}/generate", json=body).json()
            assert len(answer["output_ids"]) == 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_generate_can_be_ended(model: str, tmp_path: Path, number: signal.Signals, code: int) -> None:
    endless = ("--raw", "A river", "--max-tokens", "400", "--stop", "\n\n\n\n", "--max-total-tokens", "512")
    with start("generate", "--model-path", model, *endless, env={"TMPDIR": str(tmp_path)}) as process:
        children = []
        while len(children) < 3:
            children = psutil.Process(process.pid).children()
        process.send_signal(number)
        assert process.wait(20) == code
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert not any(child.is_running() for child in children)
    assert not list(tmp_path.iterdir())


def test_a_broken_model_is_refused_by_the_process_that_reads_it(model: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\x10")
    process = start("serve", str(tmp_path / "m"), "--port", "0")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "model.safetensors" in err
    assert "Traceback" not in err
    assert "ready" not in out


def test_what_is_not_installed_is_named_with_its_remedy() -> None:
    program = (
        "import sys, importlib.machinery as m; find = m.PathFinder.find_spec;"
        "m.PathFinder.find_spec = lambda n, *a: None if n in ('torch', 'zmq') else find(n, *a);"
        "from sapwood.srt import cli; sys.exit(cli.main(['serve']))"
    )
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 2
    assert "needs torch, pyzmq, not installed here: pip install 'sapwood[serve]'" in answer.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "--max-total-token", "5"], "--max-total-tokens"),
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--tp=2"], "unknown argument --tp"),
        (["generate", "hi", "there"], "unknown argument there"),
    ],
)
def test_an_unknown_argument_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
