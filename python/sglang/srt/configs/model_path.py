"""Where a model's files are: a directory here, or a snapshot fetched from Hugging Face."""

from __future__ import annotations

import os
import re

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_CONFIG_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer*"]
_WEIGHT_FILES = ["*.safetensors"]


def check_model_path(model_path: str, flag: str = "--model-path") -> None:
    """Raise `ValueError` that names `flag` where `model_path` is no directory and can be no Hugging Face id."""
    path = os.path.expanduser(model_path)
    if os.path.isdir(path):
        return
    if os.path.exists(path):
        raise ValueError(f"{flag} {model_path} is a file: it must be a directory")
    if not _HUB_ID.match(model_path):
        raise ValueError(f"{flag} {model_path}: there is no such directory")


def resolve_model_path(model_path: str, *, weights: bool = False, flag: str = "--model-path") -> str:
    """The local directory of `model_path`, a directory or a Hugging Face id.

    For an id the configuration and tokenizer files are fetched, and the safetensors files too when `weights` is set;
    the directory is the same either way. Raises `ValueError` that names `flag`.
    """
    check_model_path(model_path, flag)
    path = os.path.expanduser(model_path)
    return path if os.path.isdir(path) else _hub_snapshot(model_path, weights=weights, flag=flag)


def _hub_snapshot(model_id: str, *, weights: bool, flag: str) -> str:
    from huggingface_hub import snapshot_download

    patterns = _CONFIG_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return str(snapshot_download(model_id, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds; all mean that the files are not to be had
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(
            f"{flag} {model_id}: there is no such directory, and Hugging Face did not give a model of that "
            f"name ({reason})"
        ) from error
