"""What README and docs tell a reader to type works: blocks marked `<!-- run -->` run, all others are at least parsed.

A marked block is fenced and stands right below its mark; the blocks of one page run in their order, in one directory
with a cache of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang.cli import autotune, docs
from sglang.cli.main import COMMANDS
from sglang.srt.server_args import prepare_server_args

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FENCED = re.compile(r"(?P<mark><!-- run -->\n)?```(?:bash|sh)\n(?P<code>.*?)```", re.DOTALL)
INDENTED = re.compile(r"(?:^(?: {4}\S.*)(?:\n(?: {4}.*)?(?=\n))*)+", re.MULTILINE)
#: What stands for something that the reader fills in.
PLACEHOLDER = re.compile(r"\[|\.\.\.|\b[A-Z]{2,}\b|<")


def blocks(page: Path, *, marked: bool) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = [match["code"] for match in FENCED.finditer(text) if bool(match["mark"]) is marked]
    if not marked:
        plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        found += [re.sub(r"^ {4}", "", match[0], flags=re.MULTILINE) for match in INDENTED.finditer(plain)]
    return found


def command_lines(code: str) -> Iterator[list[str]]:
    """The `sglang` command lines of a block, without those that have a blank to fill in."""
    for line in code.replace("\\\n", " ").splitlines():
        if line.startswith("sglang ") and not PLACEHOLDER.search(line):
            yield shlex.split(line, comments=True)


@pytest.fixture
def shell(tmp_path):
    """Runs a block in `tmp_path` with `sglang` on the path."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sglang").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m sglang.cli.main "$@"\n')
    (tools / "sglang").chmod(0o755)

    def run(code: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY / "python"),
            "SGLANG_CACHE_DIR": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        command = ["bash", "-euo", "pipefail", "-c", code]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170
        )

    return run


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, marked=True)], ids=lambda page: page.name
)
def test_marked_blocks_run(page, shell):
    for code in blocks(page, marked=True):
        result = shell(code)
        assert result.returncode == 0, f"{page.name}:\n{code}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_flag_that_is_named_exists(page):
    for code in [*blocks(page, marked=True), *blocks(page, marked=False)]:
        for words in command_lines(code):
            _, command, *rest = words
            assert command in COMMANDS, f"{page.name}: {shlex.join(words)}"
            if command == "serve":
                prepare_server_args(rest)
            elif command == "autotune":
                assert rest and rest[0] in autotune.COMMANDS, f"{page.name}: {shlex.join(words)}"


def test_flags_named_in_the_text_exist():
    known = set(re.findall(r"--[a-z][a-z0-9-]+", docs.render()))
    # The tools that are run with `python -m`, and the scripts for a GPU host.
    for source in [*(REPOSITORY / "python").rglob("*.py"), *(REPOSITORY / "test" / "native").glob("*.py")]:
        known |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', source.read_text(encoding="utf-8")))
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        named = set(re.findall(r"`(--[a-z][a-z0-9-]+)", text))
        assert named <= known, f"{page.name}: {sorted(named - known)}"


def test_the_first_commands_of_the_readme_work_as_printed(start_server):
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    flags = re.search(r'make serve ARGS="([^"]*)"', text)
    request = re.search(r"curl http://127\.0\.0\.1:(\d+)(/\S+) .*?-d '(.*?)'", text, re.DOTALL)
    assert flags and request
    arguments = shlex.split(flags[1])
    assert arguments[arguments.index("--port") + 1] == request[1]
    prepare_server_args(arguments)
    at = arguments.index("--port")
    small = ["--max-running-requests", "8", "--chunked-prefill-size", "64"]
    server = start_server(*arguments[:at], *arguments[at + 2 :], *small, tiny=False).wait_ready()
    body = json.loads(request[3].replace("'\\''", "'"))
    answer = server.post(request[2], json=body)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"].strip().startswith("19")
    assert server.info()["autotune"]["status"] == "completed"
