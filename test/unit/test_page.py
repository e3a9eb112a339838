"""The page: complete, escaped, self-contained, and drawn on logarithmic axes."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from sglang.srt.autotune.page import render_page
from sglang.srt.autotune.page.markup import Html, escaped, tag
from sglang.srt.autotune.page.plot import Series, plot, time_ticks, token_ticks
from sglang.srt.autotune.report import StageReport
from support.sample_report import HOSTILE, OPS, sample_report


class Reader(HTMLParser):
    """Collects text and addresses, and checks that every element is closed in order."""

    VOID = {"meta"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.addresses += [value for key, value in attributes if key in ("src", "href", "xlink:href")]
        if name not in self.VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(self.text)


def test_the_page_shows_every_part_of_a_report():
    reader = Reader(render_page(sample_report()))
    for words in (
        "36 profiles tuned in 18 steps",
        "--chunked-prefill-size 4096 over 4 attention-DP ranks",
        "prefill 4096",
        *OPS,
        "MoERunner 8",
        "1 2 4 8 16 1024",
        "cublas_version: saved 13.1.0, current 13.2.0",
        "sm: saved sm_103, current sm90",
        "rank_tp0_pp0_dp0.json",
        "NVIDIA H200",
        "fp8_gemm: is it spelled right?",
        "prefill 1 was left out",
        "2 user records of an::op",
    ):
        assert words in reader.words, words
    assert "svg" in reader.tags


def test_nothing_is_fetched_and_nothing_is_run():
    page = render_page(sample_report())
    reader = Reader(page)
    assert reader.addresses == []
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert "url(" not in page and "@import" not in page and "://" not in page


def test_values_are_escaped_wherever_they_stand():
    page = render_page(sample_report(hostile=HOSTILE))
    assert "<script" not in page
    assert HOSTILE in Reader(page).words
    running = {"status": "running", "done": 1, "total": 2, "current": HOSTILE}
    assert "<script" not in render_page(running)
    assert "<script" not in render_page({**sample_report(), "status": HOSTILE, "reason": HOSTILE})


def test_while_the_engine_starts_the_page_shows_progress_and_loads_itself_again():
    running = {
        "status": "running",
        "done": 7,
        "total": 20,
        "current": "decode 64",
        "elapsed_s": 4.2,
        "remaining_s": 8,
    }
    page = render_page(running)
    words = Reader(page).words
    assert "7 of 20 steps" in words and "about 8 s left" in words and "Now: decode 64" in words
    assert 'http-equiv="refresh"' in page and "width:35%" in page
    assert "has not begun" in Reader(render_page({"status": "pending"})).words
    assert 'http-equiv="refresh"' not in render_page(sample_report())


@pytest.mark.parametrize("status", ["skipped", "failed"])
def test_a_start_that_tuned_nothing_says_why_and_no_more(status):
    report = StageReport(status=status, reason="compute capability 8.0 is below 9.0").to_json()
    reader = Reader(render_page(report))
    assert "compute capability 8.0 is below 9.0" in reader.words
    assert "table" not in reader.tags and "svg" not in reader.tags


def test_records_without_times_are_said_to_have_none():
    report = sample_report()
    for step in report["steps"]:
        step["default_ms"] = step["tuned_ms"] = None
    assert "No times are known" in Reader(render_page(report)).words


# The plot


def points(svg: str, slug: str) -> list[tuple[float, float]]:
    pattern = rf'<circle cx="([\d.]+)" cy="([\d.]+)" r="3.5" class="dot {slug}">'
    return [(float(x), float(y)) for x, y in re.findall(pattern, svg)]


def test_equal_ratios_are_equal_distances_on_both_axes():
    svg = plot([Series("tuned", "tuned", [(1, 0.1), (8, 0.2), (64, 0.4), (512, 0.8)])], "tokens")
    places = points(svg, "tuned")
    steps = [(b[0] - a[0], a[1] - b[1]) for a, b in zip(places, places[1:], strict=False)]
    assert all(step == pytest.approx(steps[0], abs=0.2) for step in steps)
    assert steps[0][0] > 0 and steps[0][1] > 0  # to the right, and up


def test_one_point_alone_and_equal_times_can_be_drawn():
    assert len(points(plot([Series("tuned", "tuned", [(16, 0.5)])], "tokens"), "tuned")) == 1
    assert len(points(plot([Series("tuned", "tuned", [(1, 1e-3), (2, 1e-3)])], "tokens"), "tuned")) == 2


def test_labels_of_lines_that_end_together_do_not_overlap():
    svg = plot([Series(name, name, [(1, 1.0), (64, 2.0)]) for name in ("default", "tuned")], "tokens")
    heights = [float(y) for y in re.findall(r'y="([\d.]+)" class="label', svg)]
    assert abs(heights[0] - heights[1]) >= 14


def test_ticks_are_round_and_few():
    assert token_ticks(1, 4096) == [1, 4, 16, 64, 256, 1024, 4096]
    assert token_ticks(3, 20) == [4, 8, 16]
    assert time_ticks(0.04, 2.5) == [0.05, 0.1, 0.2, 0.5, 1, 2]
    assert time_ticks(0.001, 100) == [0.001, 0.01, 0.1, 1, 10, 100]
    assert len(token_ticks(1, 2**20)) <= 11


# Markup


def test_only_html_passes_unescaped():
    assert escaped("<b>") == "&lt;b&gt;"
    assert tag("p", Html("<b>x</b>"), "<i>", None, title='"') == '<p title="&quot;"><b>x</b>&lt;i&gt;</p>'


# MegaMoE


def test_a_start_that_tunes_by_capacity_alone_has_its_page():
    report = sample_report()
    report.update(steps=[], plan={**report["plan"], "steps": []})
    reader = Reader(render_page(report))
    assert "MegaMoE capacities" in reader.words and "1024" in reader.words and "svg" in reader.tags
    assert "Default against tuned" not in reader.words and "Steps in their order" not in reader.words
