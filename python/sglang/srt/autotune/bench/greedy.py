"""One start of an engine that continues fixed prompts greedily: `python -m sglang.srt.autotune.bench.greedy`.

A process of its own, so that two starts share nothing. Flags are the server's; the tokens go to stdout as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from sglang.srt.autotune.bench.drive import Driver, build_runner
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.logs import setup_logging

PROMPT_LENGTHS = (1, 7, 64, 333)
NUM_TOKENS = 32


def main(argv: Sequence[str]) -> int:
    setup_logging("warning")
    args = prepare_server_args(list(argv), "greedy")
    driver = Driver(build_runner(args))
    prompts = [driver.random_ids(length) for length in PROMPT_LENGTHS]
    print(json.dumps(driver.greedy(prompts, NUM_TOKENS)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
