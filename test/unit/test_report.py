"""The report: written beside the records, read back, printed, and handed to Prometheus."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sglang.cli.autotune import main
from sglang.srt.autotune.metrics import register
from sglang.srt.autotune.report import (
    REPORT_NAME,
    StageReport,
    StepReport,
    newest_report,
    notes_of,
    read_report,
)
from support.sample_report import OPS, sample_report
from support.tiny_host import start


def written(path: Path, document: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


# A real start


def test_a_start_that_tuned_leaves_its_report_beside_the_records(tmp_path):
    report = start(tmp_path)
    kept = Path(report.cache_path).with_name(REPORT_NAME)
    assert json.loads(kept.read_text()) == json.loads(json.dumps(report.to_json()))
    assert report.engine["ops"] == ["sglang::moe"] and report.engine["device"] == "cpu"


def test_a_warm_start_writes_only_the_file_that_was_asked_for(tmp_path):
    kept = Path(start(tmp_path).cache_path).with_name(REPORT_NAME)
    before = kept.read_bytes()
    warm = start(tmp_path, report_path=tmp_path / "asked" / "for.json")
    assert warm.profiles_tuned == 0
    assert kept.read_bytes() == before
    assert read_report(tmp_path / "asked" / "for.json")["profiles_tuned"] == 0


def test_a_report_that_cannot_be_written_is_an_error_line_and_no_failure(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert start(tmp_path, report_path=tmp_path / "file" / "report.json").status == "completed"
    assert "--flashinfer-autotune-report" in caplog.text


def test_rejected_records_say_what_kind_of_thing_is_wrong(tmp_path):
    path = Path(start(tmp_path).cache_path)
    document = json.loads(path.read_text())
    document["_metadata"]["cuda_version"] = "99"
    path.write_text(json.dumps(document))
    (rejected,) = start(tmp_path).records.rejected
    assert rejected["kind"] == "environment" and rejected["path"] == str(path)


# The document


def test_numbers_that_json_has_no_word_for_become_null():
    report = StageReport(steps=[StepReport("decode", 1, relative_error=math.inf)])
    assert report.to_json()["steps"][0]["relative_error"] is None
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a JSON list"),
        ('{"_metadata": {}}', "is not an autotune report .a record file"),
        ('{"schema": 99, "steps": []}', "has report schema 99; this version reads 1"),
    ],
)
def test_a_file_that_is_no_report_is_named(tmp_path, content, words):
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path} {words}"):
        read_report(path)


def test_the_newest_report_of_a_directory_is_taken(tmp_path):
    old = written(tmp_path / "a" / REPORT_NAME, sample_report())
    new = written(tmp_path / "b" / "c" / REPORT_NAME, sample_report())
    os.utime(old, (1, 1))
    assert newest_report(tmp_path) == new
    with pytest.raises(ValueError, match="there is no report.json in or below"):
        newest_report(tmp_path / "b" / "c" / "d")


# sglang autotune report


def test_the_command_prints_outcome_steps_and_every_reason(tmp_path, capsys):
    path = written(tmp_path / "r.json", sample_report(hostile="because [so]"))
    assert main(["report", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("FlashInfer autotune completed in 11.23 s: 36 profiles tuned in 18 steps")
    assert "prefill 4096" in text and "3.00x" in text
    assert "capacity 16: tuned, 64.0 us against 71.3 us" in text
    for reason in (
        "rejected: because [so]",
        "unused: 2 user records of an::op, because [so]",
        "seed other not used: sm: saved",
        "fallback at prefill 512",
    ):
        assert reason in text


def test_the_command_writes_a_page(tmp_path, capsys):
    path = written(tmp_path / REPORT_NAME, sample_report())
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "out.html")]) == 0
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(path), "--html", str(tmp_path / "no" / "out.html")]) == 2
    assert "--html" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["report"], ["report", ""]], ids=["no path", "an unset variable"])
def test_without_a_path_the_newest_report_of_the_cache_is_taken(tmp_path, capsys, monkeypatch, argv):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    written(tmp_path / "flashinfer" / "autotune" / "a" / REPORT_NAME, sample_report())
    assert main(argv) == 0
    assert "FlashInfer autotune completed" in capsys.readouterr().out


def test_one_note_of_many_steps_is_one_line():
    notes = notes_of(
        [("decode", 8, None), ("decode", 4, "spent"), ("prefill", 64, "spent"), ("prefill", 32, "spent")]
    )
    assert notes == [("decode 4, prefill 64 32", "spent")]


def test_a_skipped_op_that_nothing_asked_for_is_a_warning_and_memory_is_no_path(tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "file").write_text("")
    report = start(tmp_path / "file", skip_ops=("misspelt",))
    assert report.cache_path is None
    assert "no forward asked for the skipped op misspelt" in caplog.text
    assert "records in memory only" in caplog.text


def test_the_command_prints_the_report_of_a_start_that_was_skipped(tmp_path, capsys):
    path = written(tmp_path / "r.json", start(tmp_path, disabled=True).to_json())
    assert main(["report", str(path)]) == 0
    assert "skipped in" in capsys.readouterr().out


# Prometheus


def scraped(report: Any) -> dict[tuple[str, ...], float]:
    """What Prometheus' own parser reads: name and label values, by the labels' names, to value."""
    registry = CollectorRegistry()
    register(report, registry)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def test_prometheus_reads_every_metric():
    values = scraped(sample_report())
    assert values[("sglang:autotune_seconds",)] == 11.23
    assert values[("sglang:autotune_profiles_tuned",)] == 36
    assert values[("sglang:autotune_fallbacks",)] == 1
    assert values[("sglang:autotune_records", "seeded")] == 2
    assert values[("sglang:autotune_records_rejected", "environment")] == 1
    assert values[("sglang:autotune_records_rejected", "file")] == 0
    assert values[("sglang:autotune_step_ms", "tuned", "4096", "prefill")] == pytest.approx(0.685)
    assert values[("sglang:autotune_status", "completed")] == 1
    assert values[("sglang:autotune_step_ms", "default", "1", "megamoe")] == pytest.approx(0.0663, abs=1e-4)
    assert values[("sglang:autotune_megamoe_capacities", "tuned")] == 2
    assert values[("sglang:autotune_records_rejected", "megamoe")] == 1


def test_label_values_are_few_and_never_free_text():
    report = sample_report(hostile='a "reason"\nwith a path')
    labels = {label for name, *rest in scraped(report) for label in rest}
    assert not any("reason" in label or op in label for label in labels for op in OPS)


def test_while_the_engine_starts_there_are_no_values_and_then_there_are():
    current: dict[str, Any] = {"status": "running", "done": 1, "total": 3}
    registry = CollectorRegistry()
    register(lambda: current, registry)
    assert generate_latest(registry) == b""
    current = sample_report()
    assert b"sglang:autotune_seconds 11.23" in generate_latest(registry)


def test_a_report_of_a_real_start_can_be_scraped(tmp_path):
    values = scraped(start(tmp_path).to_json())
    assert values[("sglang:autotune_records", "tuned")] == values[("sglang:autotune_profiles_tuned",)] > 0
