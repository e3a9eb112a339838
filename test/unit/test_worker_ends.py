"""Of several workers that end at once, the one that the others lost is named, whoever is heard first."""

from __future__ import annotations

import signal

from sglang.srt.managers.io_struct import Fatal
from sglang.srt.managers.worker_ends import SIGNAL_LAG_S, VICTIM_LAG_S, WorkerEnds


def test_a_killed_worker_is_named_before_those_that_lost_it():
    ends = WorkerEnds()
    ends.add_last_words(Fatal(0, "Connection closed by peer", lost_peer=True))
    ends.add_exit(0, 1)
    assert ends.wait_s() == VICTIM_LAG_S, "the one that was lost may be found to have ended a moment later"
    ends.add_exit(2, -signal.SIGKILL)
    assert ends.wait_s() < SIGNAL_LAG_S
    assert ends.words() == (
        "the worker of rank 2 ended with signal SIGKILL, as when the machine runs out of memory"
    )


def test_a_worker_with_a_reason_of_its_own_is_named_before_those_that_lost_it():
    ends = WorkerEnds()
    ends.add_last_words(Fatal(0, "Connection closed by peer", lost_peer=True))
    ends.add_last_words(Fatal(1, "Traceback ...\nOutOfMemoryError"))
    ends.add_exit(0, 1)
    ends.add_exit(1, 1)
    assert ends.words() == "the worker of rank 1 failed: its reason is above"


def test_when_the_lost_rank_is_not_here_a_victim_tells_what_it_saw():
    ends = WorkerEnds()
    ends.add_last_words(Fatal(4, "rank 1 was last seen at: decode 8", lost_peer=True))
    ends.add_exit(4, 1)
    assert ends.words().startswith("the worker of rank 4 lost another rank")
    assert ends.words().endswith("rank 1 was last seen at: decode 8")


def test_a_worker_that_ends_without_a_word_is_named_with_its_exit_code():
    ends = WorkerEnds()
    ends.add_exit(3, 17)
    assert ends.words() == "the worker of rank 3 ended with exit code 17"


def test_a_worker_that_a_signal_stopped_leaves_time_for_the_signal_to_arrive_here_too():
    ends = WorkerEnds()
    ends.add_exit(0, -signal.SIGTERM)
    assert ends.wait_s() == SIGNAL_LAG_S
    assert ends.words() == "the worker of rank 0 ended with signal SIGTERM"


def test_a_worker_that_leaves_cleanly_unasked_is_an_end_too():
    ends = WorkerEnds()
    ends.add_exit(0, 0)
    assert ends.words() == "the worker of rank 0 ended with exit code 0"
