"""Small helpers of the start: the device that is meant, log lines, addresses."""

from __future__ import annotations

import logging

import pytest
import torch

from sglang.srt.utils.device import resolved_device
from sglang.srt.utils.logs import setup_logging
from sglang.srt.utils.network import split_host_port


@pytest.mark.parametrize(("has_gpu", "expected"), [(True, "cuda"), (False, "cpu")])
def test_auto_device_is_the_gpu_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, expected: str
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)  # stands for the machine's GPU
    assert resolved_device("auto") == expected
    assert resolved_device("cpu") == "cpu"


def test_cuda_without_a_gpu_names_the_flag(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # stands for a machine without a GPU
    with pytest.raises(ValueError, match="^--device cuda: "):
        resolved_device("cuda")


def test_log_lines_carry_the_rank_and_the_last_setup_counts(capsys: pytest.CaptureFixture[str]):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        setup_logging("warning")
        setup_logging("info", label="TP1")
        logging.getLogger("sglang.test").info("loaded")
        logging.getLogger("sglang.test").warning("slow")
        logging.getLogger("sglang.test").debug("unseen")
        lines = capsys.readouterr().err.splitlines()
    finally:
        root.handlers[:], root.level = before, level
    assert [line.partition("] ")[2] for line in lines] == ["loaded", "WARNING: slow"]
    assert all(" TP1]" in line for line in lines)


def test_tokenizers_say_nothing_of_a_long_prompt_which_the_server_refuses_itself():
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        setup_logging("info")
        from transformers.tokenization_utils_base import logger

        assert not logger.isEnabledFor(logging.WARNING) and logger.isEnabledFor(logging.ERROR)
    finally:
        root.handlers[:], root.level = before, level


def test_addresses_split_into_host_and_port():
    assert split_host_port("node0:5000", flag="--x") == ("node0", 5000)
    assert split_host_port("[fe80::1]:5000", flag="--x") == ("fe80::1", 5000)
