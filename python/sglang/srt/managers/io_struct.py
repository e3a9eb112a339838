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


class TokenizedRequest(msgspec.Struct, tag="request"):
    """One sequence to generate. Without `incremental` its tokens are sent once, when it finishes.

    `replica` is the attention-DP replica that serves it.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    incremental: bool = False
    replica: int = 0


class AbortRequest(msgspec.Struct, tag="abort"):
    """Forget a request and free what it holds; nothing is sent back, and an unknown `rid` is fine."""

    rid: str


class GetInternalState(msgspec.Struct, tag="get_state"):
    """Asks every attention-DP replica for an `InternalState` with the same `ticket`."""

    ticket: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Leave the scheduler loop; what is still running is dropped."""


MainMessage = TokenizedRequest | AbortRequest | GetInternalState | Shutdown


class TokenOutput(msgspec.Struct, array_like=True):
    """What one request gained since its last output. `finish_reason` is None while it goes on.

    `matched_stop` is the token id that ended it, which is the last of `token_ids`, or None. `message` says why a
    request was aborted by the worker.
    """

    rid: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None
    message: str | None = None


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


WorkerMessage = BatchTokenOutput | InternalState | StartupProgress | Ready | Fatal
