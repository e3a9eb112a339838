"""Text to token ids and back, with the tokenizer that comes with the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.server_args import ServerArgs


class TextTokenizer:
    """A Hugging Face tokenizer, reduced to what serving needs."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The Rust tokenizer decodes several times faster than its Python wrapper, and never cleans up spaces.
        self._fast = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        self._token_texts: dict[int, str] = {}
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, server_args: ServerArgs) -> TextTokenizer:
        """Raises `ValueError` that names the flag when the files are missing or cannot be read."""
        from transformers import AutoTokenizer  # a second or two; the HTTP server is up before

        flag = "--tokenizer-path" if server_args.tokenizer_path else "--model-path"
        path = resolve_model_path(server_args.tokenizer, flag=flag)
        try:
            return cls(AutoTokenizer.from_pretrained(path, trust_remote_code=server_args.trust_remote_code))
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{flag} {server_args.tokenizer}: its tokenizer cannot be loaded: {reason}"
            ) from error

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds to every text.

        Raises `ValueError` for a text that has more than `max_tokens` tokens beyond doubt, without tokenising it: that
        would take seconds, in which no other request gets on.
        """
        self._check_length(text, max_tokens)
        return self._tokenizer(text)["input_ids"]

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], arguments: dict[str, Any], max_tokens: int
    ) -> list[int]:
        """Token ids of a conversation, as the model's chat template writes it when told `arguments`.

        Raises `ValueError` when there is no template, when it does not take these messages, and as `encode` does.
        """
        if not self._tokenizer.chat_template:
            raise ValueError("this model has no chat template: use /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"the model's chat template does not take these messages: {error}") from None
        self._check_length(text, max_tokens)
        # The template has written the special tokens already.
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def _check_length(self, text: str, max_tokens: int) -> None:
        # Twice, since a tokenizer may write two characters as one before it looks.
        if len(text) > 2 * max_tokens * self._longest_token:
            raise ValueError(
                f"prompt has {len(text)} characters, far more than the {max_tokens} tokens that fit"
            )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self._fast is not None:
            return self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; half a character is shown as the replacement character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text
