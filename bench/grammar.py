"""Verdicts on JSON schemas: which instances a constraint lets through, against what validators say.

    python -m bench.grammar verdicts --jsonschemabench FILE --suite FOLDER [--raw] [--json FILE]

Each instance is written with the default separators, as `json.dumps` has them, and its tokens are put to the
grammar one by one. `--raw`: the same by the engine's own reading of schemas, and by xgrammar's if that is
installed. An instance refused for the order of its properties alone is counted apart: the order is the
schema's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance

from sapwood.srt.config import make
from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar.compile import compile_constraint
from sapwood.srt.grammar.engine import Engine, Matcher
from sapwood.srt.grammar.schema import read
from sapwood.srt.loader.sources import resolve
from sapwood.srt.params import Constraint
from tests.documents import allows

Accepts = Callable[[str], bool]
Compiler = Callable[[Any], Accepts]
"""A schema to a judge of texts; raises ValueError (BadRequest) if the schema is refused."""
WAYS = ("right", "refused", "wrong accept", "wrong refusal", "order")


@dataclass
class Case:
    """A schema with its instances: (data, valid)."""

    name: str
    group: str
    schema: Any
    instances: list[tuple[Any, bool]]


@dataclass
class Verdicts:
    """How schemas fared, each counted once by the worst that befell its instances, and in which group."""

    schemas: Counter[str] = field(default_factory=Counter)
    instances: Counter[str] = field(default_factory=Counter)
    by_group: dict[str, Counter[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def bench_cases(path: Path) -> Iterator[Case]:
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        tests = [(test["data"], test["valid"]) for test in entry["tests"]]
        yield Case(entry["id"], entry["stratum"], entry["schema"], tests)


def suite_cases(folder: Path) -> Iterator[Case]:
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            tests = [(test["data"], test["valid"]) for test in group["tests"]]
            yield Case(f"{path.stem}: {group['description']}", path.stem, group["schema"], tests)


def ours(engine: Engine) -> Compiler:
    def compiled(schema: Any) -> Accepts:
        grammar = compile_constraint(Constraint("json_schema", json.dumps(schema), "schema"), engine)
        matcher = engine.compile(grammar.text)
        return lambda text: taken(engine, matcher, text)

    return compiled


def taken(engine: Engine, start: Matcher, text: str) -> bool:
    """Whether the masks let the text's tokens through one by one, and then let it end."""
    matcher, ids = start.copy(), engine.tokenize(text)
    return matcher.accept(ids) == len(ids) and matcher.complete


def raw_llguidance(engine: Engine) -> Compiler:
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

    def compiled(schema: Any) -> Accepts:
        text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        matcher = engine.compile(text)
        return lambda text: taken(engine, matcher, text)

    return compiled


def raw_xgrammar(tokenizer_file: str, vocab_size: int) -> Compiler | None:
    try:
        import xgrammar
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(tokenizer_file)
    words = [tokenizer.id_to_token(i) or "" for i in range(vocab_size)]
    info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.BYTE_LEVEL)
    compiler = xgrammar.GrammarCompiler(info)

    def compiled(schema: Any) -> Accepts:
        try:
            text = json.dumps(schema)
            grammar = compiler.compile_json_schema(text, any_whitespace=False, strict_mode=False)
        except RuntimeError as error:
            raise ValueError(str(error)) from None

        def accepts(text: str) -> bool:
            matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
            return bool(matcher.accept_string(text) and matcher.is_terminated())

        return accepts

    return compiled


def judge(cases: list[Case], compiler: Compiler) -> Verdicts:
    found = Verdicts()
    for case in cases:
        start = time.process_time()
        try:
            accepts = compiler(case.schema)
        except ValueError as error:
            found.seconds.append(time.process_time() - start)
            # A schema that admits nothing is refused by right, if it is so.
            right = "admits no value" in str(error) and not any(valid for _, valid in case.instances)
            _count(found, case, "right" if right else "refused", f"{error!s:.200}")
            continue
        found.seconds.append(time.process_time() - start)
        ways = [_way(case.schema, accepts, data, valid) for data, valid in case.instances]
        found.instances.update(ways)
        worst = min(ways, key=["wrong accept", "wrong refusal", "order", "right"].index, default="right")
        _count(
            found, case, worst, str([data for data, _ in case.instances][ways.index(worst)] if ways else "")
        )
    return found


def _count(found: Verdicts, case: Case, way: str, note: str) -> None:
    found.schemas[way] += 1
    found.by_group.setdefault(case.group, Counter())[way] += 1
    if way != "right":
        found.notes.append(f"{way}: {case.name}: {note:.240}")


def _way(schema: Any, accepts: Accepts, data: Any, valid: bool) -> str:
    got = any(accepts(json.dumps(data, ensure_ascii=ascii_only)) for ascii_only in (False, True))
    if got == valid:
        return "right"
    if got:
        return "wrong accept"
    try:
        document = read(json.dumps(schema), "schema")
    except BadRequest:
        return "wrong refusal"
    ordered = allows(document, data, ordered=True)
    return "order" if allows(document, data) and not ordered else "wrong refusal"


def _row(name: str, found: Counter[str]) -> str:
    return f"{name:28s}" + "".join(f"{found[way]:>15d}" for way in WAYS)


def verdicts(options: argparse.Namespace) -> dict[str, Any]:
    source = resolve(make(model_path=options.model) if options.model else make())
    engine = Engine(source.tokenizer_file or "", source.vocab_size, source.eos_ids)
    ways: dict[str, Compiler] = {"sapwood": ours(engine)}
    if options.raw:
        ways[f"llguidance {importlib.metadata.version('llguidance')}"] = raw_llguidance(engine)
        xgrammar = raw_xgrammar(source.tokenizer_file or "", source.vocab_size)
        if xgrammar is not None:
            ways[f"xgrammar {importlib.metadata.version('xgrammar')}"] = xgrammar
    sets: dict[str, list[Case]] = {}
    if options.jsonschemabench:
        sets["jsonschemabench"] = list(bench_cases(options.jsonschemabench))
    if options.suite:
        sets["test suite"] = list(suite_cases(options.suite))
    report: dict[str, Any] = {}
    for title, cases in sets.items():
        print(f"\n{title}: {len(cases)} schemas\n{'':28s}" + "".join(f"{way:>15s}" for way in WAYS))
        for name, compiler in ways.items():
            compiler(True)  # what is made once and kept
            found = judge(cases, compiler)
            print(_row(name, found.schemas))
            if name == "sapwood":
                for group, counts in found.by_group.items():
                    print(_row("  " + group, counts))
                print("\n".join("  " + note for note in found.notes))
            times = sorted(found.seconds)
            report[f"{title}, {name}"] = {
                "schemas": found.schemas,
                "instances": found.instances,
                "groups": found.by_group,
                "notes": found.notes,
                "compile_cpu_ms": {
                    "p50": 1e3 * times[len(times) // 2],
                    "p99": 1e3 * times[int(len(times) * 0.99)],
                    "max": 1e3 * times[-1],
                },
            }
            print(f"{'  to compile, ms of CPU':28s} p50 {report[f'{title}, {name}']['compile_cpu_ms']}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.grammar", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("verdicts")
    command.add_argument("--jsonschemabench", type=Path)
    command.add_argument("--suite", type=Path)
    command.add_argument("--model", default="")
    command.add_argument("--raw", action="store_true")
    command.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = verdicts(options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
