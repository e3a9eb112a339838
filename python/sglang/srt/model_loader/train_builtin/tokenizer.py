"""The byte-level tokenizer of the built-in model: a token's id is its byte, specials follow."""

from __future__ import annotations

import json
from pathlib import Path

END_OF_TEXT, IM_START, IM_END, PAD = 256, 257, 258, 259
SPECIAL_TOKENS = {
    "<|endoftext|>": END_OF_TEXT,
    "<|im_start|>": IM_START,
    "<|im_end|>": IM_END,
    "<|pad|>": PAD,
}

VOCAB_SIZE = 264
"""256 bytes and four specials, padded to a multiple of 8 so that eight ranks can share the vocabulary."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def byte_to_char() -> list[str]:
    """The printable stand-in of every byte that the byte-level pre-tokenizer uses (the GPT-2 table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in printable}
    spare = 256
    for byte in range(256):
        if byte not in chars:
            chars[byte] = chr(spare)
            spare += 1
    return [chars[byte] for byte in range(256)]


def tokenizer_json() -> dict:
    """The ``tokenizer.json`` document: byte-level BPE without merges."""
    added = [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text, token_id in SPECIAL_TOKENS.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {char: byte for byte, char in enumerate(byte_to_char())},
            "merges": [],
        },
    }


def tokenizer_config(max_length: int) -> dict:
    """The ``tokenizer_config.json`` document."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def write_tokenizer(directory: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``directory``."""
    for name, document in (
        ("tokenizer.json", tokenizer_json()),
        ("tokenizer_config.json", tokenizer_config(max_length)),
    ):
        text = json.dumps(document, indent=1, ensure_ascii=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")
