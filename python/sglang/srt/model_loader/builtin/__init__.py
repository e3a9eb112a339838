"""The built-in model: a tiny Qwen3-MoE checkpoint that answers arithmetic, served when no model is named.

The files beside this module are written by ``python -m sglang.srt.model_loader.train_builtin``.
"""

from __future__ import annotations

from pathlib import Path

BUILTIN_MODEL_PATH = str(Path(__file__).resolve().parent)
"""Directory of the checkpoint, its config and its tokenizer."""
