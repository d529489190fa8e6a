"""Runs `serve` as the command line does, with roles out of this folder.

`python launch_driver.py {"config": {...}, "roles": {...}, "resolve_seconds": 0, "grace": 5, "far": 3600}`
"""

import functools
import json
import sys
import time

from sapwood.srt import child, config, launch, serve
from sapwood.srt.config import ModelSource
from sapwood.srt.errors import SapwoodError

SOURCE = ModelSource(
    name="tiny", format="dummy", path="nowhere", files=[], architecture="LlamaForCausalLM", config={},
    vocab_size=8, context_length=64, eos_ids=[0], tokenizer_file=None, chat_template=None, template_vars={},
    sampling_defaults={},
)  # fmt: skip


def main() -> int:
    given = json.loads(sys.argv[1])
    launch.DRAIN_GRACE_SECONDS = given.get("grace", launch.DRAIN_GRACE_SECONDS)
    if (far := given.get("far")) is not None:
        launch.POLL_SECONDS = launch.FAREWELL_SECONDS = far
        child.stop = functools.partial(child.stop, seconds=far)

    def resolve(_: config.Config) -> ModelSource:
        print("resolving", flush=True)
        time.sleep(given.get("resolve_seconds", 0))
        return SOURCE

    try:
        return serve.serve(config.make(**given["config"]), resolve, given["roles"])
    except SapwoodError as e:
        print(e.message, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
