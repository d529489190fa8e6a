"""The `sapwood` command: what it answers, what it refuses, and with which exit code."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

import sapwood
from sapwood.srt import cli
from sapwood.srt.cli.command import COMMANDS
from sapwood.srt.flags.anyway import ANYWAY
from sapwood.srt.flags.entry import Entry
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
        [sys.executable, "-P", "-m", "sapwood", *arguments],
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
    for arguments in (["version"], ["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        said = capsys.readouterr().out
        configured = arguments[0] in ("serve", "generate", "chat", "batch")
        assert ("--chunked-prefill-size" in said) is configured
        assert (said == f"sapwood {sapwood.__version__}\n") is ("version" in arguments[0])
        if arguments[0] in ("serve", "chat"):
            assert "org/name" in said
            assert "`sapwood models`" in " ".join(said.split())


def test_without_a_command_the_help_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert all(f"  {name} " in said.err for name in COMMANDS)


def test_the_package_can_be_run() -> None:
    answer = start("version")
    assert answer.communicate() == (f"sapwood {sapwood.__version__}\n", "")
    assert answer.returncode == 0


def test_help_and_refusals_load_no_torch() -> None:
    program = (
        "import sys, contextlib, io\n"
        "from sapwood.srt import cli\n"
        "for argv in (['serve', '--help'], ['chat', '--help'], ['batch', '--help'], ['env'], ['models']):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        cli.main(argv)\n"
        "cli.main(['serve', '--pp', '2'])\n"
        "heavy = ('torch', 'fastapi', 'uvicorn', 'transformers', 'rich', 'httpx')\n"
        "print(*(m for m in heavy if m in sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (answer.stdout, answer.returncode) == ("\n", 0), answer.stderr
    assert "pipeline parallelism is not there" in answer.stderr


def test_a_wrong_value_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--context-length must be from 2 to 16777216, got 1" in refused(
        capsys, "serve", "--context-length", "1"
    )
    assert "--port must be a whole number, got 'http'" in refused(capsys, "serve", "--port", "http")
    isas = "--cpu-isa must be auto, amx, avx512, avx2 or portable"
    assert isas in refused(capsys, "chat", "--cpu-isa", "neon")
    assert "--max-tokens: invalid int value: 'x'" in refused(capsys, "generate", "y", "--max-tokens", "x")
    assert "required: PROMPT" in refused(capsys, "generate")
    assert "unknown command serv; did you mean serve?" in refused(capsys, "serv")
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
    others = ("--pipeline-parallel-size", "1", "--max-num-seqs", "8", "--log-level=debug", "--block-size=1")
    with start("serve", model, "--port", "0", "--max-total-tokens", "512", *others) as process:
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
            info = httpx.get(f"{url}/server_info").json()
            assert info["config"]["max_running_requests"] == 8
            body = {"text": "A river", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
            answer = httpx.post(f"{url}/generate", json=body).json()
            assert len(answer["output_ids"]) == 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert process.stderr is not None
            said = process.stderr.read()
            assert "sapwood: debug: --pipeline-parallel-size 1: pipeline parallelism is not there" in said
            assert "sapwood: debug: --block-size 1: a page is one token" in said
        finally:
            process.kill()


def accepted(entry: Entry) -> str:
    """The flag with a value that it is accepted with."""
    value = entry.accepts[0].replace("*", "true" if entry.switch else "x")
    return f"{entry.flag}={value}"


def test_what_is_so_anyway_is_so(model: str) -> None:
    """Every flag that asks for what is so anyway at once; what they ask for is looked at, where it can be."""
    flags = [accepted(entry) for entry in ANYWAY]
    common = ("--port", "0", "--max-total-tokens", "512", "--num-threads", "1")
    with start("serve", model, *common, *flags) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            while "scheduling" not in lines[-1]:
                lines.append(process.stdout.readline())
                assert lines[-1] or process.poll() is None, (lines, process.communicate())
            with httpx.Client(base_url=lines[1].split()[1]) as http:
                # skip_server_warmup: nothing has been computed before the first request
                assert "sapwood_output_tokens_total 0.0" in http.get("/metrics").text
                # sleep_on_idle
                (scheduler,) = [
                    p for p in psutil.Process(process.pid).children() if "scheduler" in p.cmdline()
                ]
                before = scheduler.cpu_times()
                time.sleep(0.5)
                after = scheduler.cpu_times()
                assert after.user + after.system - before.user - before.system < 0.1
                # enable_cache_report, enable_prompt_tokens_details
                body = {"prompt": "A river", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
                once, again = (http.post("/v1/completions", json=body).json() for _ in range(2))
                counts = [answer["usage"]["prompt_tokens_details"] for answer in (once, again)]
                assert [count["cached_tokens"] > 0 for count in counts] == [False, True]
                # enable_deterministic_inference: beside others too
                with ThreadPoolExecutor(4) as pool:
                    beside = [pool.submit(http.post, "/v1/completions", json=body) for _ in range(8)]
                    texts = {answer.result().json()["choices"][0]["text"] for answer in beside}
                assert texts == {once["choices"][0]["text"]} == {again["choices"][0]["text"]}
                # is_embedding
                assert http.post("/v1/embeddings", json={"input": "A river"}).status_code == 200
                # enable_metrics
                assert "sapwood_requests_total" in http.get("/metrics").text
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert process.stderr is not None
            # disable_uvicorn_access_log, and no progress bar (use_tqdm_on_load)
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_a_misspelt_variable_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "fail_on_environ_validation" in {entry.name for entry in ANYWAY}
    monkeypatch.setenv("SAPWOOD_PROT", "1")
    assert "unknown environment variable SAPWOOD_PROT" in refused(capsys, "serve")


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
        (["serve", "--pp=2"], "--pp 2 is refused: pipeline parallelism is not there"),
        (["serve", "--max-model-length", "5"], "--max-model-len"),
        (["serve", "--enable-lora"], "--enable-lora is refused: adapters (LoRA) are not there yet"),
        (["serve", "--max-num-seqs", "4", "--max-running-requests", "5"], "contradict each other"),
        (["chat", "--speculative-algorithm", "EAGLE"], "not from a second model"),
        (["batch", "a", "b", "--urll", "x"], "--url"),
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
