"""`GET /autotune` of a real server, looked at by a real browser where there is one."""

from __future__ import annotations

import html
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from sglang.srt.autotune.page import render_page
from support.sample_report import HOSTILE, sample_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
PHONE, DESKTOP = (390, 844), (1100, 900)


def browse(address: str, *options: str) -> str:
    """What headless Chromium writes to stdout for a page."""
    assert CHROMIUM is not None
    fixed = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    result = subprocess.run(
        [CHROMIUM, *fixed, *options, address], capture_output=True, text=True, timeout=120, check=True
    )
    return result.stdout


def measured(page: str, size: tuple[int, int], directory: Path) -> dict[str, int]:
    """Lay the page out in a frame of `size` (a window cannot be as narrow as a phone) and measure it there."""
    width, height = size
    script = """
      const inner = frames[0].document, svg = inner.querySelector("svg"), labels = inner.querySelectorAll(".label");
      const box = svg ? svg.getBoundingClientRect() : {width: 0, height: 0, right: 0};
      const right = Math.max(0, ...[...labels].map(label => label.getBoundingClientRect().right));
      document.body.textContent = ["MEASURED", inner.documentElement.scrollWidth, box.width, box.height,
        right - box.right, inner.querySelectorAll("script").length].map(v => typeof v === "number" ? Math.ceil(v) : v)
        .join(" ");
    """
    wrapper = directory / "wrapper.html"
    wrapper.write_text(
        f'<meta charset="utf-8"><body style="margin:0"><iframe style="border:0" width="{width}" height="{height}" '
        f'srcdoc="{html.escape(page)}"></iframe><script>onload = () => {{{script}}}</script>'
    )
    dump = browse(wrapper.as_uri(), "--window-size=1400,1000", "--dump-dom")
    found = re.search(r"MEASURED (-?\d+) (-?\d+) (-?\d+) (-?\d+) (-?\d+)", dump)
    assert found, dump[-500:]
    names = ("page_width", "plot_width", "plot_height", "label_beyond_plot", "scripts")
    return dict(zip(names, map(int, found.groups()), strict=True))


def test_the_page_is_there_before_the_engine_is_and_after(start_server):
    server = start_server("--max-running-requests", "2", "--chunked-prefill-size", "8")
    server.wait_until("the page", lambda: server.get("/autotune").status_code == 200, 60)
    first = server.get("/autotune").text
    assert 'http-equiv="refresh"' in first or "completed" in first
    server.wait_ready()
    response = server.get("/autotune")
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert "completed" in response.text and "decode 2" in response.text
    assert 'http-equiv="refresh"' not in response.text


@needs_browser
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_a_browser_lays_it_out_within_the_screen(size, tmp_path):
    layout = measured(render_page(sample_report()), size, tmp_path)
    assert layout["page_width"] <= size[0]
    assert layout["plot_width"] > 0.8 * min(size[0], 900) and layout["plot_height"] > 120
    assert layout["label_beyond_plot"] <= 0


@needs_browser
def test_a_browser_finds_no_script_in_hostile_values(tmp_path):
    page = render_page(sample_report(hostile=HOSTILE + "x" * 400))
    layout = measured(page, PHONE, tmp_path)
    assert layout["scripts"] == 0
    assert layout["page_width"] <= PHONE[0]


@needs_browser
def test_a_browser_shows_the_page_of_a_real_start_by_day_and_by_night(start_server, tmp_path):
    server = start_server("--max-running-requests", "4", "--chunked-prefill-size", "16").wait_ready()
    address, pictures = f"{server.base_url}/autotune", []
    for night in (False, True):
        picture = tmp_path / f"night-{night}.png"
        scheme = ["--blink-settings=preferredColorScheme=0"] if night else []
        browse(address, f"--screenshot={picture}", "--window-size=1100,900", *scheme)
        pictures.append(picture.read_bytes())
        assert pictures[-1].startswith(b"\x89PNG") and struct.unpack(">II", pictures[-1][16:24]) == DESKTOP
        assert len(pictures[-1]) > 20_000  # an empty page is a few kilobytes
    assert pictures[0] != pictures[1]
    assert "decode 4" in browse(address, "--dump-dom")
