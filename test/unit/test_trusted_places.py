"""Files and places: the stage writes where it may, reads what it can trust, and never runs what it reads."""

from __future__ import annotations

import ast
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from flashinfer.autotuner import AutoTuner

import sglang.srt.autotune
from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.flashinfer_api import TuningUnavailable
from support.forks import NOBODY
from support.tiny_host import start

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def clean_tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(flashinfer_api.BLOCKLIST_VARIABLE, "")
    AutoTuner.get()  # it reads the variable once, and raises for a file that tests below put there
    yield
    AutoTuner.get().clear_cache()


def test_a_report_path_that_is_a_pipe_or_a_directory_stays_what_it_is(tmp_path, caplog):
    pipe, directory = tmp_path / "pipe", tmp_path / "directory"
    os.mkfifo(pipe)
    directory.mkdir()
    for path in (pipe, directory):
        assert start(tmp_path / "root", report_path=path).status == "completed"
        assert f"--flashinfer-autotune-report {path} cannot be written" in caplog.text
    assert stat.S_ISFIFO(pipe.stat().st_mode) and os.listdir(directory) == []
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    start(tmp_path / "root", report_path=pipe)
    assert json.loads(os.read(reader, 1 << 20))["status"] == "completed"
    os.close(reader)


def test_a_report_path_that_is_a_link_stays_one(tmp_path):
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    start(tmp_path / "root", report_path=link)
    assert link.is_symlink() and json.loads(target.read_text())["status"] == "completed"


def test_without_a_place_for_temporary_files_the_engine_serves_untuned(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(flashinfer_api, "_SHARED_MEMORY", str(tmp_path / "none"))

    def refuse(*args, **kwargs):
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(flashinfer_api.tempfile, "TemporaryDirectory", refuse)
    report = start(tmp_path)
    assert report.status == "failed" and "TMPDIR" in report.reason
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_disk_that_fills_up_while_records_are_exchanged_is_no_crash(tmp_path, monkeypatch):
    AutoTuner.get()

    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AutoTuner, "save_configs", full)
    with pytest.raises(TuningUnavailable, match="No space left"):
        flashinfer_api.stored_entries()
    assert start(tmp_path).status == "failed"


def test_a_link_below_the_root_that_leads_out_of_it_is_left_alone(tmp_path):
    victim = tmp_path / "victim.json"
    victim.write_text("precious")
    path = Path(start(tmp_path / "root").cache_path)
    path.unlink()
    path.symlink_to(victim)
    report = start(tmp_path / "root")
    assert report.status == "completed" and report.profiles_tuned == 5
    assert report.cache_path is None and "leads out of" in " ".join(report.warnings)
    assert victim.read_text() == "precious" and sorted(os.listdir(tmp_path)) == ["root", "victim.json"]
    assert path.is_symlink()


@needs_root
def test_a_root_that_is_another_users_link_is_neither_read_nor_written(tmp_path, caplog):
    start(tmp_path / "real")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    os.lchown(link, NOBODY, NOBODY)
    report = start(link)
    assert report.status == "completed" and report.records.user == 0 and report.profiles_tuned == 5
    assert f"belongs to user {NOBODY}" in caplog.text
    link.unlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@needs_root
@pytest.mark.parametrize(("mode", "used"), [(0o755, True), (0o1777, False)])
def test_another_users_directory_is_used_unless_anyone_could_have_put_it_there(tmp_path, caplog, mode, used):
    caplog.set_level(logging.WARNING)
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    start(place / "root")
    os.chown(place / "root", NOBODY, NOBODY)
    report = start(place / "root")
    assert report.status == "completed" and (report.profiles_tuned == 0) is used
    assert f"user {NOBODY}" in caplog.text


def test_a_file_of_nonsense_does_not_fill_the_log(tmp_path, caplog):
    path = Path(start(tmp_path).cache_path)
    document = json.loads(path.read_text())
    document.update({f"nonsense {number}": [] for number in range(5000)})
    path.write_text(json.dumps(document))
    report = start(tmp_path)
    assert report.profiles_tuned == 0 and len(report.records.rejected) == 21
    assert "4980 more entries" in report.records.rejected[-1]["reason"]
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 21


def test_the_subsystem_never_runs_what_it_reads():
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    for path in Path(sglang.srt.autotune.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            elif isinstance(node, ast.Call):
                names = [ast.unparse(node.func)]
            for name in names:
                assert not forbidden & set(name.split(".")), f"{path}: {name}"
                assert name not in ("eval", "exec", "torch.load", "literal_eval"), f"{path}: {name}"
