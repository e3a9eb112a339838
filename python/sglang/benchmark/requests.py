"""One request, from its first byte to its last, with the time of every token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from sglang.benchmark.backends import AnswerError, Backend, News, Prompt, RequestOptions
from sglang.benchmark.http import Address, TransportError, post


@dataclass
class Trace:
    """What became of one request. `error` says why it failed; times are seconds from the moment it was sent."""

    num_prompt: int
    num_output: int = 0
    num_cached: int = 0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of a token after the first; None when there is only one."""
        return (self.latency_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else None


class _EventReader:
    """Takes a stream of server-sent events apart and notes when tokens came.

    A backend that counts tokens in its events lets several that came in one event share its interval; of the others
    each event with text is one interval.
    """

    def __init__(self, backend: Backend, trace: Trace) -> None:
        self._backend, self._trace = backend, trace
        self._buffer = b""
        self._num_seen = 0
        self._start_s = self._last_s = time.perf_counter()

    def on_data(self, data: bytes) -> None:
        now_s = time.perf_counter()
        buffer = self._buffer + data if self._buffer else data
        # Lines of an event end in \n or \r\n; an event here is one line of data.
        *lines, self._buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (text := line[5:].strip()) != b"[DONE]":
                self._on_news(self._backend.read(text), now_s)

    def _on_news(self, news: News, now_s: float) -> None:
        trace = self._trace
        if news.num_cached is not None:
            trace.num_cached = news.num_cached
        if news.num_prompt is not None:
            trace.num_prompt = news.num_prompt
        num_new = 1 if news.has_text else 0
        if self._backend.counts_tokens:
            num_new = (news.num_output or self._num_seen) - self._num_seen
        self._num_seen += num_new
        # A server that never tells a count is taken to send one token in each event.
        trace.num_output = news.num_output or self._num_seen
        if num_new <= 0:
            return
        if trace.ttft_s == 0.0:
            trace.ttft_s = now_s - self._start_s
        else:
            trace.itl_s += [(now_s - self._last_s) / num_new] * num_new
        self._last_s = now_s


async def send_request(
    address: Address,
    backend: Backend,
    prompt: Prompt,
    num_output: int,
    options: RequestOptions,
    headers: dict[str, str],
    timeout_s: float,
) -> Trace:
    """Send one request and wait for all of its answer; a failure is told in the trace, not raised."""
    body = backend.encoded_body(prompt, num_output, options)
    trace = Trace(num_prompt=prompt.num_tokens)
    reader = _EventReader(backend, trace)
    start_s = time.perf_counter()
    try:
        on_data = reader.on_data if options.stream else None
        response = await asyncio.wait_for(post(address, backend.path, body, headers, on_data), timeout_s)
        trace.latency_s = time.perf_counter() - start_s
        if response.status != 200:
            words = " ".join(response.body.decode(errors="replace").split())
            trace.error = f"HTTP {response.status} {response.reason}: {words[:300]}"
        elif not options.stream:
            _read_whole(backend, bytes(response.body), trace)
    except (TransportError, AnswerError) as error:
        trace.error = str(error)
    except msgspec.MsgspecError as error:
        trace.error = f"the answer cannot be read: {error}"
    except asyncio.TimeoutError:
        trace.error = f"no answer within {timeout_s:g} s"
    if trace.error is None and trace.num_output == 0:
        trace.error = "the answer has no tokens"
    if trace.ttft_s == 0.0:  # No text at all, or not streamed: the first token came with the last.
        trace.ttft_s = trace.latency_s
    return trace


def _read_whole(backend: Backend, body: bytes, trace: Trace) -> None:
    news = backend.read(body)
    trace.num_output = news.num_output or 0
    trace.num_prompt = trace.num_prompt if news.num_prompt is None else news.num_prompt
    trace.num_cached = news.num_cached or 0
