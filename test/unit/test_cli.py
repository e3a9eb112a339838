"""The `sglang` command: dispatch, exit codes, one-line errors, and the generated page."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.cli import docs
from sglang.cli.main import COMMANDS, main
from sglang.srt import launch_checks
from sglang.srt.utils.network import bind_http_socket, free_port
from sglang.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    code = "import sys; from sglang.cli.main import main; main(['version']); print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True
    )
    assert result.stdout.splitlines()[-1] == "False"


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "usage: sglang" in capsys.readouterr().out


def test_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["serv"]) == 2
    assert capsys.readouterr().err == f"sglang: error: unknown command 'serv': one of {', '.join(COMMANDS)}\n"


@pytest.mark.parametrize("spelling", ["version", "--version"])
def test_version_names_what_it_runs_on(capsys: pytest.CaptureFixture[str], spelling: str):
    assert main([spelling]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"sglang {__version__}"
    assert any(line.startswith("flashinfer-python ") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--tp-size", "0"], "sglang serve: error: --tp-size must be at least 1 (got 0)"),
        (["--prt", "1"], "sglang serve: error: unknown flag --prt: did you mean --port?"),
        (
            ["--enable-lora"],
            "sglang serve: error: --enable-lora is a flag of SGLang that is not built here: leave it out",
        ),
    ],
)
def test_wrong_flag_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
):
    assert main(["serve", *arguments]) == 2
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--moe-runner-backend", "flashinfer_megamoe"],
            "--moe-runner-backend flashinfer_megamoe needs a GPU: use reference_megamoe with --device cpu",
        ),
        (
            ["--device", "cuda"],
            "--device cuda: this machine shows no GPU; use --device cpu or leave --device out",
        ),
        (["--model-path", "/no/such"], "--model-path /no/such: there is no such directory"),
        (["--tp-size", "3"], "--tp-size must divide the model's attention heads (got 3 and 4)"),
    ],
)
def test_a_flag_that_this_machine_or_model_cannot_do_is_exit_code_2_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str
):
    monkeypatch.setattr(launch_checks, "has_nvidia_driver", lambda: False)
    assert main(["serve", *arguments]) == 2
    assert capsys.readouterr().err == f"sglang serve: error: {line}\n"


@pytest.mark.parametrize(
    ("command", "prog"),
    [
        (["-m", "sglang.cli.main", "serve"], "sglang serve"),
        (["-m", "sglang.launch_server"], "sglang.launch_server"),
    ],
)
def test_both_spellings_of_serve_end_the_same_way(command: list[str], prog: str):
    result = run(*command, "--tp-size", "x")
    assert result.returncode == 2
    assert result.stderr.startswith(f"{prog}: error: --tp-size")
    assert len(result.stderr.splitlines()) == 1


def test_serve_help_exits_cleanly():
    result = run("-m", "sglang.cli.main", "serve", "--help")
    assert result.returncode == 0
    assert "--disable-flashinfer-autotune" in result.stdout


@pytest.mark.parametrize("name", docs.pages())
def test_written_pages_are_up_to_date(name: str):
    page = ROOT / "docs" / name
    assert page.read_text(encoding="utf-8") == docs.pages()[name], "run `make docs`"


# Ports, which the server checks before it starts anything


def test_occupied_port_names_the_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port} is in use on 127.0.0.1"):
            bind_http_socket("127.0.0.1", port)


def test_serve_warns_once_of_a_skipped_op_that_no_kernel_asks_for(capsys: pytest.CaptureFixture[str]):
    with socket.socket() as busy:  # the start ends there, before any process
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        flags = ["--device", "cpu", "--port", port, "--flashinfer-autotune-skip-ops", "sglang::meo"]
        assert main(["serve", *flags]) == 1, "a port that is taken is no wrong flag"
    warning, end = capsys.readouterr().err.splitlines()
    assert warning.endswith(
        "WARNING: --flashinfer-autotune-skip-ops sglang::meo: no kernel here asks for such an op; "
        "did you mean sglang::moe?"
    )
    assert f"--port {port} is in use" in end


def test_port_is_taken_as_soon_as_it_is_bound():
    with bind_http_socket("127.0.0.1", free_port()) as first:
        with pytest.raises(ValueError, match="is in use"):
            bind_http_socket("127.0.0.1", first.getsockname()[1])


def test_foreign_address_names_the_flag():
    with pytest.raises(ValueError, match="--host 192.0.2.1 is not an address of this machine"):
        bind_http_socket("192.0.2.1", free_port())
