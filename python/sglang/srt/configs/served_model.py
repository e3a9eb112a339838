"""The configuration of the model that the flags name."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs


def read_model_config(args: ServerArgs, device: str | None = None) -> ModelConfig:
    """The served model's configuration on `device` ("cuda" or "cpu"); without one it has the checkpoint's dtype.

    Raises `ValueError` that names the flag or the file.
    """
    return ModelConfig.from_path(
        args.model_path,
        overrides=args.model_overrides,
        dtype="auto" if device is None else args.dtype_on(device),
        context_length=args.context_length,
        quantization=args.quantization,
    )
