"""The note of the step in progress."""

from sglang.srt.autotune.journal import Journal


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
    journal = Journal(path)
    journal.begin("prefill 8192")
    journal.failed("prefill 8192", "OutOfMemoryError: no memory")
    (left,) = Journal(path).left_out()
    assert left.step == "prefill 8192"
    assert "OutOfMemoryError" in left.reason


def test_a_step_during_which_the_process_vanished_is_tried_once_more(tmp_path):
    path = tmp_path / "j"
    Journal(path).begin("decode 8")
    second = Journal(path)
    assert second.left_out() == []
    second.begin("decode 8")
    third = Journal(path)
    assert [left.step for left in third.left_out()] == ["decode 8"]
    third.begin("decode 16")
    third.done("decode 16")
    assert [left.step for left in Journal(path).left_out()] == ["decode 8"], (
        "another step's end forgets nothing"
    )


def test_a_step_that_succeeds_on_the_second_try_is_forgiven(tmp_path):
    path = tmp_path / "j"
    Journal(path).begin("decode 8")
    second = Journal(path)
    second.begin("decode 8")
    second.done("decode 8")
    assert not path.exists()


def test_a_note_that_cannot_be_read_or_written_stops_nothing(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b"\xff{[not json")
    assert Journal(path).left_out() == []
    path.write_text('{"open": 3, "decode 8": {"vanished": "many"}}')
    assert Journal(path).left_out() == []
    blocked = tmp_path / "file" / "j"
    (tmp_path / "file").write_text("a file where a directory should be")
    journal = Journal(blocked)
    journal.begin("decode 8")
    journal.done("decode 8")
    Journal(None).begin("decode 8")
