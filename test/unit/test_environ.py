"""Environment variables: typed, read when asked, and refused by name when they make no sense."""

from __future__ import annotations

import os
import pwd

import pytest

from sglang.srt.environ import EnvBool, EnvInt, Envs, envs, home_dir


class Samples(Envs):
    SAMPLE_COUNT = EnvInt(3, "A count.", minimum=1)
    SAMPLE_SWITCH = EnvBool(False, "A switch.")


samples = Samples()


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("No", False)]
)
def test_switch_reads_the_usual_words(monkeypatch: pytest.MonkeyPatch, text: str, value: bool):
    monkeypatch.setenv("SAMPLE_SWITCH", text)
    assert samples.SAMPLE_SWITCH.get() is value


def test_empty_means_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAMPLE_COUNT", "  ")
    assert samples.SAMPLE_COUNT.get() == 3
    assert not samples.SAMPLE_COUNT.is_set()


def test_bad_value_names_the_variable_and_what_it_accepts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_FLASHINFER_AUTOTUNE_CACHE", "maybe")
    with pytest.raises(ValueError, match="SGLANG_FLASHINFER_AUTOTUNE_CACHE='maybe' .* 1, true, yes, on or 0"):
        envs.SGLANG_FLASHINFER_AUTOTUNE_CACHE.get()


@pytest.mark.parametrize("text", ["0", "-2", "1.5", "many"])
def test_integer_out_of_bounds_is_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("SAMPLE_COUNT", text)
    with pytest.raises(ValueError, match="SAMPLE_COUNT=.* an integer of at least 1"):
        samples.SAMPLE_COUNT.get()


@pytest.mark.parametrize("text", ["nan", "inf", "1e400", "0", "-1", "soon"])
def test_timeout_must_be_a_positive_finite_number(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("SGLANG_AUTOTUNE_TIMEOUT", text)
    with pytest.raises(ValueError, match="SGLANG_AUTOTUNE_TIMEOUT"):
        envs.SGLANG_AUTOTUNE_TIMEOUT.get()


@pytest.mark.parametrize("text", ["/tmp/a\nb", "/tmp/\x1b[31m", os.fsdecode(b"/tmp/\xff")])
def test_a_path_that_would_spoil_a_log_line_is_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("SGLANG_CACHE_DIR", text)
    with pytest.raises(ValueError, match="SGLANG_CACHE_DIR=.* printable"):
        envs.SGLANG_CACHE_DIR.get()


def test_value_is_read_when_asked(monkeypatch: pytest.MonkeyPatch):
    assert envs.SGLANG_AUTOTUNE_TIMEOUT.get() == 600.0
    monkeypatch.setenv("SGLANG_AUTOTUNE_TIMEOUT", "2.5")
    assert envs.SGLANG_AUTOTUNE_TIMEOUT.get() == 2.5


def test_override_ends_with_its_block():
    with envs.SGLANG_FLASHINFER_AUTOTUNE_EXTEND.override(False):
        assert envs.SGLANG_FLASHINFER_AUTOTUNE_EXTEND.get() is False
        with envs.SGLANG_FLASHINFER_AUTOTUNE_EXTEND.override(None):
            assert envs.SGLANG_FLASHINFER_AUTOTUNE_EXTEND.get() is True
        assert os.environ["SGLANG_FLASHINFER_AUTOTUNE_EXTEND"] == "0"
    assert "SGLANG_FLASHINFER_AUTOTUNE_EXTEND" not in os.environ


def test_override_ends_when_its_block_raises():
    with pytest.raises(RuntimeError), samples.SAMPLE_COUNT.override(9):
        assert samples.SAMPLE_COUNT.get() == 9
        raise RuntimeError
    assert samples.SAMPLE_COUNT.get() == 3


def test_cache_dir_defaults_to_the_home_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SGLANG_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/of-mine")
    assert envs.SGLANG_CACHE_DIR.get() == "/home/of-mine/.cache/sglang"


def test_cache_dir_expands_home_and_is_absolute(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/of-mine")
    monkeypatch.setenv("SGLANG_CACHE_DIR", "~/tuned")
    assert envs.SGLANG_CACHE_DIR.get() == "/home/of-mine/tuned"
    monkeypatch.setenv("SGLANG_CACHE_DIR", "tuned")
    assert envs.SGLANG_CACHE_DIR.get() == os.path.abspath("tuned")


def test_home_without_the_variable_comes_from_the_password_database(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HOME")
    assert home_dir() == pwd.getpwuid(os.getuid()).pw_dir


def test_home_of_an_unknown_user_lies_under_the_temp_dir(monkeypatch: pytest.MonkeyPatch):
    def unknown(uid: int) -> None:  # stands for a container that runs under a uid without an entry
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert home_dir().endswith(f"/sglang-{os.getuid()}")


def test_every_variable_is_documented():
    for name, field in Envs.fields().items():
        assert name.startswith("SGLANG_")
        assert field.doc.endswith("."), name
