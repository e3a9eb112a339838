"""How the next token of one request is chosen, and when the request ends.

One value travels from the HTTP request to the sampler. It is checked once, where it enters, so that the
worker can trust it. Free of torch: the HTTP side imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

TOP_K_ALL = -1
"""`top_k` that keeps the whole vocabulary."""

MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling and stopping of one request; the names and defaults are SGLang's.

    `temperature` 0 is greedy. Penalties weigh on the tokens given so far (see `logit_adjustments`), and `logit_bias`
    maps token ids to what is added to their logits. `seed` makes the tokens a function of (prompt, parameters,
    seed), whatever else runs in the batch. `stop` is matched on text by the process that detokenises;
    `stop_token_ids` and the model's end tokens are matched on ids by the scheduler.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken: at temperature 0, or when only one token is kept."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    def check(self) -> None:
        """Raise `ValueError`, naming the parameter and the values it takes, for the first that is out of range."""
        _require(self.max_new_tokens >= 0, "max_new_tokens", "at least 0", self.max_new_tokens)
        # Written so that NaN fails too.
        _require(0.0 <= self.temperature < float("inf"), "temperature", "at least 0", self.temperature)
        _require(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        _require(
            self.top_k == TOP_K_ALL or self.top_k >= 1, "top_k", "-1 (all tokens) or at least 1", self.top_k
        )
        _require(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1", self.min_p)
        for name in ("frequency_penalty", "presence_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, "between -2 and 2", getattr(self, name))
        _require(
            0.0 < self.repetition_penalty <= 2.0,
            "repetition_penalty",
            "above 0 and at most 2",
            self.repetition_penalty,
        )
        for value in self.logit_bias.values():
            _require(-100.0 <= value <= 100.0, "logit_bias", "made of numbers between -100 and 100", value)
        if self.seed is not None:
            _require(-MAX_SEED - 1 <= self.seed <= MAX_SEED, "seed", "a 64-bit integer", self.seed)
        _require(all(self.stop), "stop", "made of strings that are not empty", self.stop)


def _require(holds: bool, name: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value!r}")


def model_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """What a model's `generation_config.json` says where a request says nothing; raises `ValueError` when it is wrong.

    Only numbers that shape the distribution count, not `do_sample`: temperature 0 of a request is greedy.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if given.get("top_k") == 0:
        given["top_k"] = TOP_K_ALL
    try:
        defaults = msgspec.convert(given, SamplingParams)
        defaults.check()
    except ValueError as error:
        raise ValueError(
            f"generation_config.json: {error}: repair it, or start with --sampling-defaults openai"
        ) from None
    return defaults
