"""Do clients that know nothing of Sapwood work with it? Each one, unchanged, from an environment of its own.

    python -m bench.clients --url http://127.0.0.1:PORT --venvs DIR [--gsm8k FILE] [--only NAME]...
                            [--cases 1000] [--json FILE]

DIR/NAME is a virtual environment with the client; --gsm8k is a JSON Lines file with `question` and `final`.
A client passes if what it runs ends well and its own numbers say that nothing failed. The server should have
a short context (`sapwood serve --context-length 1024`): schemathesis asks for the longest answers there are.
"""

from __future__ import annotations

import argparse
import collections
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from sapwood import __version__
from sapwood.srt.config import make
from sapwood.srt.loader.sources import resolve

SCRIPTS = Path(__file__).parent / "client_scripts"
KEY = "none"
REQUESTS = 64
PACKAGES = {
    "openai": "openai",
    "litellm": "litellm",
    "langchain": "langchain-openai",
    "instructor": "instructor",
    "lmeval": "lm-eval",
    "guidellm": "guidellm",
    "aiperf": "aiperf",
    "schemathesis": "schemathesis",
}

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nThe answer is"
"""
CHOICES = """\
output_type: multiple_choice
doc_to_choice: "{{[' ' ~ final, ' ' ~ (final | int + 1), ' ' ~ (final | int * 2 + 7), ' yes']}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
GENERATE = """\
output_type: generate_until
doc_to_target: "{{final}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match, ignore_punctuation: true}]
"""


class Setup(NamedTuple):
    """Where the server and the clients are. `tokenizer` is a folder that transformers loads."""

    url: str
    model: str
    venvs: Path
    tokenizer: Path
    gsm8k: Path | None
    cases: int
    scratch: Path


class Failed(Exception):
    """The client says that something went wrong."""


def run(setup: Setup, *command: str | Path, seconds: float = 900.0, good: tuple[int, ...] = (0,)) -> str:
    """What a command prints; Failed with its end if its exit code is not among the good ones."""
    env = {
        "PATH": f"{Path(command[0]).parent}:/usr/bin:/bin",
        "HOME": str(setup.scratch),
        "OPENAI_API_KEY": KEY,
        "HF_HOME": str(setup.scratch / "hf"),
        "TOKENIZERS_PARALLELISM": "false",
        "AIPERF_UI_TYPE": "none",
    }
    answer = subprocess.run(
        [str(part) for part in command],
        cwd=setup.scratch,
        env=env,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    told = answer.stdout + answer.stderr
    (setup.scratch / f"{Path(command[0]).parts[-3]}.log").write_text(told)
    if answer.returncode not in good:
        raise Failed(f"exit code {answer.returncode}: {told[-2000:]}")
    return answer.stdout


def python_script(name: str) -> Callable[[Setup], tuple[str, str]]:
    def check(setup: Setup) -> tuple[str, str]:
        command = [setup.venvs / name / "bin" / "python", SCRIPTS / f"{name}_client.py"]
        told = run(setup, *command, f"{setup.url}/v1", setup.model, KEY)
        return f"python {name}_client.py URL/v1 MODEL KEY", told.strip().splitlines()[-1]

    return check


def lmeval(setup: Setup) -> tuple[str, str]:
    """Scores by loglikelihood (echo and logprobs) twice, the second time cached: every number must agree."""
    if setup.gsm8k is None:
        return "", "skipped: needs --gsm8k"
    tasks = setup.scratch / "tasks"
    tasks.mkdir(exist_ok=True)
    head = {"data": json.dumps(str(setup.gsm8k.resolve()))}
    for name, rest in (("sapwood_choices", CHOICES), ("sapwood_generate", GENERATE)):
        (tasks / f"{name}.yaml").write_text(TASK.format(name=name, **head) + rest)
    found = []
    for part in ("first", "second"):
        out = setup.scratch / part
        arguments = (
            f"model={setup.model},base_url={setup.url}/v1/completions,tokenizer_backend=huggingface,"
            f"tokenizer={setup.tokenizer},num_concurrent=4,max_retries=1,max_length=1024"
        )
        command = [
            setup.venvs / "lmeval" / "bin" / "lm_eval",
            *("--model", "local-completions", "--model_args", arguments),
            *("--tasks", "sapwood_choices,sapwood_generate", "--include_path", tasks),
            *("--limit", "16", "--batch_size", "4", "--log_samples", "--output_path", out),
        ]
        run(setup, *command)
        found.append(_samples(out))
    if found[0] != found[1]:
        raise Failed(f"two runs differ: {found[0][:3]} and {found[1][:3]}")
    told = f"{len(found[0])} requests twice, every number equal"
    return "lm_eval --model local-completions --tasks (choices, generate) --limit 16", told


def _samples(folder: Path) -> list[Any]:
    """What the server gave for each request of a run, in their order."""
    answers = []
    for file in sorted(folder.rglob("samples_*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in sorted(rows, key=lambda r: r["doc_id"]):
            answers += row["resps"]
    if not answers:
        raise Failed("no samples were logged")
    return answers


def guidellm(setup: Setup) -> tuple[str, str]:
    report = setup.scratch / "guidellm.json"
    command = [
        setup.venvs / "guidellm" / "bin" / "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={setup.url},model={setup.model}"),
        *("--profile", "kind=concurrent,streams=8"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={setup.tokenizer}"),
        *("--output", f"kind=json,path={report}", "--disable-console-interactive"),
    ]
    run(setup, *command)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if totals["errored"] or totals["successful"] < REQUESTS:
        raise Failed(f"{totals}")
    return shown(setup, command), f"{totals['successful']} requests, {totals['errored']} errors"


def aiperf(setup: Setup) -> tuple[str, str]:
    out = setup.scratch / "aiperf"
    command = [
        setup.venvs / "aiperf" / "bin" / "aiperf",
        "profile",
        *("--model", setup.model, "--url", setup.url, "--endpoint-type", "chat", "--streaming"),
        *("--request-count", str(REQUESTS), "--concurrency", "8", "--isl", "48", "--osl", "16"),
        *("--tokenizer", setup.tokenizer, "--ui", "none", "--no-server-metrics", "--random-seed", "1"),
        *("--artifact-dir", out),
    ]
    run(setup, *command)
    (report,) = out.rglob("profile_export_aiperf.json")
    told = json.loads(report.read_text())
    good = (told.get("request_count") or {}).get("avg", 0)
    errors = (told.get("error_request_count") or {}).get("avg", 0)
    if good < REQUESTS or errors:
        raise Failed(f"{good} requests, {errors} errors: {told.get('error_summary')}")
    return shown(setup, command), f"{good:g} requests, {errors:g} errors"


def schemathesis(setup: Setup) -> tuple[str, str]:
    report = setup.scratch / "schemathesis.ndjson"
    operations = httpx.get(f"{setup.url}/openapi.json").json()["paths"].values()
    count = sum(method in ("get", "post", "put", "delete") for one in operations for method in one)
    command = [
        setup.venvs / "schemathesis" / "bin" / "schemathesis",
        *("run", f"{setup.url}/openapi.json", "--checks", "not_a_server_error"),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", str(-(-setup.cases // count))),
        *("--continue-on-failure", "--no-shrink", "--seed", "1", "--request-timeout", "120"),
        *("--report", "ndjson", "--report-ndjson-path", report),
    ]
    told = run(setup, *command, seconds=3600, good=(0, 1))
    answers = list(_answers(report))
    broken = [status for status in answers if status >= 500]
    if broken or httpx.get(f"{setup.url}/health").status_code != 200:
        raise Failed(f"{len(broken)} answers of {len(answers)} are 5xx: {told[-2000:]}")
    if len(answers) < setup.cases:
        raise Failed(f"only {len(answers)} cases")
    counts = collections.Counter(answers)
    listed = ", ".join(f"{number} x {status}" for status, number in sorted(counts.items()))
    return shown(setup, command), f"{len(answers)} cases on {count} operations: {listed}"


def _answers(report: Path) -> Iterator[int]:
    """The status of each case in a schemathesis report."""
    for line in report.read_text().splitlines():
        scenario = json.loads(line).get("ScenarioFinished", {})
        for case in scenario.get("recorder", {}).get("interactions", {}).values():
            if case.get("response") is None:
                raise Failed(f"no answer to {case['request']}")
            yield case["response"]["status_code"]


def shown(setup: Setup, command: list[Any]) -> str:
    """A command as somebody else would type it."""
    text = shlex.join([Path(command[0]).name, *map(str, command[1:])])
    for value, name in (
        (str(setup.scratch), "OUT"),
        (str(setup.tokenizer), "TOKENIZER"),
        (setup.url, "URL"),
        (setup.model, "MODEL"),
    ):
        text = text.replace(value, name)
    return text


CHECKS: dict[str, Callable[[Setup], tuple[str, str]]] = {
    "openai": python_script("openai"),
    "litellm": python_script("litellm"),
    "langchain": python_script("langchain"),
    "instructor": python_script("instructor"),
    "lmeval": lmeval,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "schemathesis": schemathesis,
}


def version(setup: Setup, name: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({PACKAGES[name]!r}))"
    python = setup.venvs / name / "bin" / "python"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "?"


def check(setup: Setup, name: str) -> dict[str, Any]:
    began = time.monotonic()
    command = ""
    try:
        command, result = CHECKS[name](setup)
        passed = None if result.startswith("skipped") else True
    except (Failed, subprocess.TimeoutExpired, OSError, KeyError, ValueError) as e:
        result, passed = f"FAILED: {e}", False
    return {
        "client": name,
        "package": PACKAGES[name],
        "version": version(setup, name),
        "command": command,
        "result": result,
        "passed": passed,
        "seconds": round(time.monotonic() - began, 1),
    }


def tokenizer_folder(scratch: Path, model_path: str | None) -> Path:
    """The served model's tokenizer as transformers loads it."""
    source = resolve(make(model_path=model_path))
    if source.tokenizer_file is None:
        raise SystemExit("the model has no tokenizer")
    folder = scratch / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(Path(source.tokenizer_file).read_bytes())
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    words = {name: source.template_vars[name] for name in names if source.template_vars.get(name)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **words, "chat_template": source.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--venvs", type=Path, required=True)
    parser.add_argument("--model-path", help="what the server serves, if not the packaged default")
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--only", action="append", choices=CHECKS)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="a folder for what the clients write and print")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = httpx.get(f"{args.url}/v1/models").json()["data"][0]["id"]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        tokenizer = tokenizer_folder(Path(temporary), args.model_path)
        setup = Setup(
            args.url, model, args.venvs.absolute(), tokenizer, args.gsm8k, args.cases, scratch.absolute()
        )
        for name in args.only or CHECKS:
            row = check(setup, name)
            rows.append(row)
            print(
                f"{row['package']:18} {row['version']:10} {row['seconds']:7.1f} s  {row['result']}",
                flush=True,
            )
    if args.json:
        report = {"sapwood": __version__, "model": model, "clients": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(row["passed"] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
