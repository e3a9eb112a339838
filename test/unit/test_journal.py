"""The note of the step in progress."""

import json
import os

from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.journal import MAX_STOPPED, Journal, left_out_by_any, note_stop


def vanish_in(path, step):
    """A start that ends in ``step`` without a word: the note stays, the lock goes with the process."""
    journal = Journal(path)
    journal.begin(step)
    journal.close()


def left_out(path):
    with Journal(path) as journal:
        return [left.step for left in journal.left_out()]


def test_a_start_that_finishes_its_steps_leaves_nothing(tmp_path):
    path = tmp_path / "rank.json.journal"
    journal = Journal(path)
    journal.begin("decode 8")
    assert path.exists()
    journal.done("decode 8")
    assert not path.exists()
    assert Journal(path).left_out() == []


def test_a_step_that_failed_by_an_error_is_left_out_at_once(tmp_path):
    path = tmp_path / "j"
    with Journal(path) as journal:
        journal.begin("prefill 8192")
        journal.failed("prefill 8192", "OutOfMemoryError: no memory")
    with Journal(path) as later:
        (left,) = later.left_out()
    assert left.step == "prefill 8192"
    assert "OutOfMemoryError" in left.reason


def test_a_step_during_which_the_process_vanished_is_tried_once_more(tmp_path):
    path = tmp_path / "j"
    vanish_in(path, "decode 8")
    assert left_out(path) == []
    vanish_in(path, "decode 8")
    with Journal(path) as third:
        assert [left.step for left in third.left_out()] == ["decode 8"]
        third.begin("decode 16")
        third.done("decode 16")
    assert left_out(path) == ["decode 8"], "another step's end forgets nothing"


def test_a_step_that_succeeds_on_the_second_try_is_forgiven(tmp_path):
    path = tmp_path / "j"
    vanish_in(path, "decode 8")
    with Journal(path) as second:
        second.begin("decode 8")
        second.done("decode 8")
    assert not path.exists()


def be_stopped_in(path, step):
    """A start that is asked to end in ``step``; what its other threads still do notes nothing."""
    journal = Journal(path)
    journal.begin(step)
    note_stop()
    journal.close()


def test_a_step_during_which_starts_were_stopped_is_left_out_only_after_many(tmp_path):
    path = tmp_path / "j"
    for _ in range(MAX_STOPPED - 1):
        be_stopped_in(path, "decode 8")
        assert left_out(path) == []
    assert json.loads(path.read_text())["decode 8"]["vanished"] == 0
    be_stopped_in(path, "decode 8")
    with Journal(path) as journal:
        (left,) = journal.left_out()
    assert left.reason == f"{MAX_STOPPED} earlier starts were stopped there"


def test_a_stop_between_steps_or_after_them_notes_nothing(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path)
    note_stop()
    journal.close()
    note_stop()
    assert not path.exists()


def test_a_second_engine_on_the_same_journal_takes_no_running_step_for_a_death(tmp_path):
    path = tmp_path / "j"
    with Journal(path) as first:
        first.begin("decode 8")
        for _ in range(3):
            with Journal(path) as second:
                assert second.left_out() == []
                second.begin("prefill 16")
                second.done("prefill 16")
        assert json.loads(path.read_text()) == {"open": {"step": "decode 8"}}, "the note is the first one's"
        first.done("decode 8")
    assert not path.exists()


def test_a_failure_of_a_second_engine_is_kept_beside_the_note_of_the_first(tmp_path):
    path = tmp_path / "j"
    first = Journal(path)
    first.begin("decode 8")
    with Journal(path) as second:
        second.failed("prefill 16", "RuntimeError: no")
    first.close()
    assert left_out(path) == ["prefill 16"]
    assert json.loads(path.read_text())["decode 8"]["vanished"] == 1


class OtherRanks:
    """An agreement with ranks that are elsewhere."""

    def __init__(self, answers):
        self.answers = answers

    def gather(self, question, mine):
        return {0: mine, **self.answers}


def test_the_file_to_delete_is_that_of_the_rank_whose_start_broke(tmp_path):
    others = OtherRanks(
        {
            1: ["/host1/rank_tp1.journal", {"decode 8": "it broke there", "decode 4": "here too"}],
            2: ["/host1/rank_tp2.journal", {"decode 4": "here as well"}],
        }
    )
    with Journal(tmp_path / "j") as journal:
        found = left_out_by_any(others, journal, "what broke")
    assert found["decode 8"].reason == "it broke there"
    assert found["decode 8"].remedy == "delete /host1/rank_tp1.journal to try it again"
    remedy = "delete /host1/rank_tp1.journal and the journal of rank 2 to try it again"
    assert found["decode 4"].remedy == remedy


def test_the_file_to_delete_is_named_also_where_it_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "j"
    vanish_in(path, "decode 8")
    vanish_in(path, "decode 8")

    def full(*args, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr("sglang.srt.autotune.journal.replace_file", full)
    with Journal(path) as journal:
        journal.begin("decode 4")
        left = left_out_by_any(Agreement.alone(), journal, "what broke")["decode 8"]
    assert left.remedy == f"delete {path} to try it again"


def test_a_hostile_note_neither_hangs_nor_breaks_a_start(tmp_path):
    path = tmp_path / "j"
    os.mkfifo(path)
    assert left_out(path) == []
    path.unlink()
    for content in (
        '{"a":' * 100_000,
        '{"s": {"vanished": 1e999}}',
        '{"s": {"error": [1]}, "open": {"step": "\\u0000"}}',
    ):
        path.write_text(content)
        assert left_out(path) == []
    path.write_text(
        json.dumps({"decode 8\n": {"vanished": 9}, "decode 9": {"error": "\x1b[31m" + "x" * 10_000}})
    )
    with Journal(path) as journal:
        (left,) = journal.left_out()
    assert left.step == "decode 9" and left.reason.isprintable() and len(left.reason) < 600


def test_a_note_that_cannot_be_read_or_written_stops_nothing(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b"\xff{[not json")
    assert left_out(path) == []
    path.write_text('{"open": 3, "decode 8": {"vanished": "many"}}')
    assert left_out(path) == []
    blocked = tmp_path / "file" / "j"
    (tmp_path / "file").write_text("a file where a directory should be")
    journal = Journal(blocked)
    journal.begin("decode 8")
    journal.done("decode 8")
    Journal(None).begin("decode 8")
