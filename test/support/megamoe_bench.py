"""Benches for sweep workers whose candidates misbehave on purpose: a stand-in for a GPU kernel that crashes or errs."""

from __future__ import annotations

import os
import time
from typing import Any

from sglang.srt.autotune.megamoe.kernels.base import Knobs


class ScriptedBench:
    """Times are what the knobs say; `do` makes a candidate wrong, raise, or take the process with it."""

    def prepare(self, capacity: int, knobs: Knobs) -> Knobs:
        if knobs.get("do") == "die":
            os._exit(7)
        if knobs.get("do") == "raise":
            raise RuntimeError("this tile does not compile")
        return knobs

    def error(self, prepared: Knobs) -> float:
        return 0.5 if prepared.get("do") == "wrong" else 1e-6

    def time_us(self, prepared: Knobs, repeats: int) -> float:
        directory = os.environ["SCRIPTED_DIRECTORY"]
        mine = os.path.join(directory, f"timing-{os.getpid()}")
        open(mine, "w").close()
        time.sleep(0.01)
        others = [name for name in os.listdir(directory) if name.startswith("timing-")]
        os.unlink(mine)
        if len(others) > 1:
            open(os.path.join(directory, "overlap"), "w").close()
        return float(prepared["us"])

    def release(self, prepared: Knobs) -> None:
        return


def create(**arguments: Any) -> ScriptedBench:
    if arguments.get("broken"):
        raise ImportError("no compiler here")
    return ScriptedBench()
