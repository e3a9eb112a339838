"""The messages between the HTTP process and the workers.

Main to worker: requests, aborts and questions. Worker to main: progress of the start, tokens (one message per
step, for the whole batch), answers, and the last words of a worker that fails. Every message is a msgspec
struct with a tag, so that one decoder per direction reads them all.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sglang.srt.sampling.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class LogprobParams(msgspec.Struct, omit_defaults=True):
    """Log-probabilities that a request wants of its output tokens, and of prompt tokens from `prompt_start` on.

    `num_top` most likely tokens are told beside each token; `prompt_start` None leaves the prompt out.
    """

    num_top: int = 0
    prompt_start: int | None = None


class TokenizedRequest(msgspec.Struct, tag="request"):
    """One sequence to generate. Without `incremental` its tokens are sent once, when it finishes.

    `replica` is the attention-DP replica that serves it.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    incremental: bool = False
    replica: int = 0
    logprobs: LogprobParams | None = None


class AbortRequest(msgspec.Struct, tag="abort"):
    """Forget a request and free what it holds; nothing is sent back, and an unknown `rid` is fine."""

    rid: str


class GetInternalState(msgspec.Struct, tag="get_state"):
    """Asks every attention-DP replica for an `InternalState` with the same `ticket`."""

    ticket: int


class FlushCache(msgspec.Struct, tag="flush"):
    """Asks every attention-DP replica to empty its prefix cache, which it does if it has no requests."""

    ticket: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Leave the scheduler loop; what is still running is dropped."""


MainMessage = TokenizedRequest | AbortRequest | GetInternalState | FlushCache | Shutdown


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Natural log-probabilities of consecutive tokens, from the model's logits before anything changes them.

    `values[i]` is None for a token that nothing comes before. `top[i]` holds (token id, log-probability) pairs of the
    most likely tokens at its place, best first; it is empty when none were asked for.
    """

    values: list[float | None] = msgspec.field(default_factory=list)
    top: list[list[tuple[int, float]]] = msgspec.field(default_factory=list)

    def append(self, value: float | None, top: list[tuple[int, float]]) -> None:
        self.values.append(value)
        self.top.append(top)

    def extend(self, more: TokenLogprobs) -> None:
        self.values += more.values
        self.top += more.top

    def cut(self, start: int, stop: int | None = None) -> TokenLogprobs:
        """Those of tokens `start` to `stop`."""
        return TokenLogprobs(self.values[start:stop], self.top[start:stop])


class TokenOutput(msgspec.Struct, array_like=True):
    """What one request gained since its last output. `finish_reason` is None while it goes on.

    `matched_stop` is the token id that ended it, which is the last of `token_ids`, or None. `message` says why a
    request was aborted by the worker. `logprobs` are those of `token_ids`; `prompt_logprobs` come with the first
    output. `num_cached_tokens` counts prompt tokens that were found in the prefix cache.
    """

    rid: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None
    message: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0


class BatchTokenOutput(msgspec.Struct, tag="tokens"):
    """The outputs of one step."""

    outputs: list[TokenOutput]


class InternalState(msgspec.Struct, tag="state", kw_only=True):
    """The counts of one replica's scheduler at one moment; tokens are KV slots."""

    ticket: int
    replica: int = 0
    max_total_num_tokens: int
    num_used_tokens: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_retractions: int


class CacheFlushed(msgspec.Struct, tag="flushed", kw_only=True):
    """The answer of one replica to `FlushCache`; `is_done` is False when requests kept it from doing so."""

    ticket: int
    replica: int = 0
    is_done: bool


class StartupProgress(msgspec.Struct, tag="progress"):
    """A worker entered a stage of its start (`stage`), or got further in it (`detail`, the stage's own words)."""

    rank: int
    stage: str
    detail: dict[str, Any] = {}


class Ready(msgspec.Struct, tag="ready"):
    """A worker can serve. `info` holds its limits (`max_total_num_tokens`, `context_len`, ...) and `autotune`."""

    rank: int
    info: dict[str, Any]


class Fatal(msgspec.Struct, tag="fatal"):
    """A worker ends because of an error. It has already written `traceback` to its stderr.

    `lost_peer` says that the error is another rank's: that one ended, or did not answer in time.
    """

    rank: int
    traceback: str
    lost_peer: bool = False


WorkerMessage = BatchTokenOutput | InternalState | CacheFlushed | StartupProgress | Ready | Fatal
