"""Where a model's files are: a directory here, or a snapshot fetched from Hugging Face."""

from __future__ import annotations

import os
import re

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_CONFIG_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer*"]
_WEIGHT_FILES = ["*.safetensors"]


def resolve_model_path(model_path: str, *, weights: bool = False) -> str:
    """The local directory of `model_path`, a directory or a Hugging Face id.

    For an id the configuration and tokenizer files are fetched, and the safetensors files too when `weights` is set;
    the directory is the same either way. Raises `ValueError` that names `--model-path`.
    """
    path = os.path.expanduser(model_path)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise ValueError(f"--model-path {model_path} is a file: it must be the directory with config.json")
    if _HUB_ID.match(model_path):
        return _hub_snapshot(model_path, weights=weights)
    raise ValueError(f"--model-path {model_path}: there is no such directory")


def _hub_snapshot(model_id: str, *, weights: bool) -> str:
    from huggingface_hub import snapshot_download

    patterns = _CONFIG_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return str(snapshot_download(model_id, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds; all mean that the files are not to be had
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(
            f"--model-path {model_id}: there is no such directory, and Hugging Face did not give a model of that "
            f"name ({reason})"
        ) from error
