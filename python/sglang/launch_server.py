"""`python -m sglang.launch_server`, the older spelling of `sglang serve`."""

from __future__ import annotations

import sys

from sglang.cli.serve import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="sglang.launch_server"))
