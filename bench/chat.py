"""How much of its history does a chat find in the cache? Every turn resends all that was said.

    python -m bench.chat [--questions FILE] [--chats 5] [--turns 6] [--max-tokens 48] [--json FILE] [MODEL]

Per turn: the prompt's tokens, those of the history (the last prompt and its answer), those that the cache
can hold (all of the history but the answer's last token, which was sampled but never computed, and no more
than agrees with the prompt), and those that were cached. The answer comes back as text: where encoding it
again gives other ids than were generated, the prompt agrees with the cache only up to there; how often is
counted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.peers import chat_ids
from bench.reference import BUILT_IN, questions
from sapwood import Engine, __version__
from sapwood.srt.config import make
from sapwood.srt.loader.sources import resolve


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def turn(engine: Engine, source: Any, messages: list[dict[str, str]], last: list[int], count: int) -> Any:
    """(row of the table, answer, all ids of this turn)."""
    answer = engine.chat(messages, {"temperature": 0, "max_new_tokens": count})
    prompt = chat_ids(source, messages)
    meta = answer["meta_info"]
    assert meta["prompt_tokens"] == len(prompt)
    agrees = common(prompt, last)
    row = {
        "prompt": len(prompt),
        "history": len(last),
        "possible": max(0, min(agrees, len(last) - 1)),
        "cached": meta["cached_tokens"],
        "stopped": meta["cache"]["stopped"],
        "retokenised_differently": agrees < len(last),
    }
    return row, answer, [*prompt, *answer["output_ids"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--chats", type=int, default=5)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = resolve(make(model_path=args.model))
    asked = questions(args.questions, args.chats * args.turns) if args.questions else BUILT_IN * args.turns
    rows = []
    with Engine(model_path=args.model, log_level="warning") as engine:
        for chat in range(args.chats):
            messages: list[dict[str, str]] = []
            last: list[int] = []
            engine.flush_cache()
            for k in range(args.turns):
                messages.append({"role": "user", "content": asked[(chat * args.turns + k) % len(asked)]})
                row, answer, last = turn(engine, source, messages, last, args.max_tokens)
                messages.append({"role": "assistant", "content": answer["text"]})
                rows.append({"chat": chat, "turn": k + 1, **row})
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    short = sum(row["cached"] < row["possible"] for row in rows)
    differ = sum(row["retokenised_differently"] for row in rows)
    later = sum(row["turn"] > 1 for row in rows)
    print(
        f"{short} turns found less than was possible; of {later} later turns {differ} retokenised differently"
    )
    if args.json:
        args.json.write_text(json.dumps({"sapwood": __version__, "short": short, "rows": rows}, indent=1))
    return 1 if short else 0


if __name__ == "__main__":
    raise SystemExit(main())
