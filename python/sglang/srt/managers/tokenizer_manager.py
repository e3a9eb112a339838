"""The engine as the HTTP process sees it: prompts go in, pieces of text come out.

Runs on one asyncio loop, and nothing here blocks it. Limits are checked here, so that a request which can never
be served is refused before it reaches a worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.dispatch import Dispatcher
from sglang.srt.managers.generation import EngineError, Generation, Piece, SequenceState
from sglang.srt.managers.io_struct import (
    AbortRequest,
    BatchTokenOutput,
    CacheFlushed,
    FlushCache,
    GetInternalState,
    InternalState,
    LogprobParams,
    MainMessage,
    Shutdown,
    TokenizedRequest,
    TokenOutput,
    WorkerMessage,
)
from sglang.srt.managers.ipc import Endpoints, without_limits
from sglang.srt.managers.tokenizer import TextTokenizer
from sglang.srt.sampling.sampling_params import MAX_SEED, SamplingParams, model_defaults
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

Prompt = str | list[int]


class RequestObserver(Protocol):
    """Hears about every sequence: each that is `started` gains tokens and is `ended` once."""

    def started(self, rid: str, num_prompt_tokens: int) -> None: ...

    def gained(self, rid: str, num_tokens: int, num_cached_tokens: int) -> None: ...

    def ended(self, rid: str, is_complete: bool) -> None: ...


class TokenizerManager:
    """Sends requests to the first worker and routes what comes back to the generations that wait for it.

    `on_startup_message` gets the workers' messages about their start and end; they are not handled here.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        endpoints: Endpoints,
        on_startup_message: Callable[[WorkerMessage], None],
        observer: RequestObserver | None = None,
    ) -> None:
        self._vocab_size = model_config.vocab_size
        self._max_total_tokens = model_config.context_length
        self.default_sampling = SamplingParams()
        """What a request gets where it says nothing."""
        if server_args.sampling_defaults == "model":
            self.default_sampling = model_defaults(model_config.generation_config)
        self._on_startup_message = on_startup_message
        self._observer = observer
        self._tokenizer: TextTokenizer | None = None
        self._context = zmq.asyncio.Context()
        self._pull: zmq.asyncio.Socket = without_limits(self._context.socket(zmq.PULL))
        self._pull.bind(endpoints.to_main)
        self._push: zmq.Socket = without_limits(zmq.Context(self._context).socket(zmq.PUSH))
        self._push.bind(endpoints.to_worker)
        self._encoder = msgspec.msgpack.Encoder()
        self._routes: dict[str, tuple[Generation, SequenceState]] = {}
        self._num_replicas = server_args.attn_dp_size
        self._dispatcher = Dispatcher(self._num_replicas)
        self._answers: dict[int, asyncio.Queue[InternalState | CacheFlushed]] = {}
        self._numbers = itertools.count()
        self._seeds = random.Random(server_args.random_seed)
        self.last_output_s = -math.inf
        """When a worker last sent tokens, on the monotonic clock."""

    def set_tokenizer(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def limit_total_tokens(self, max_total_num_tokens: int) -> None:
        """Take the size of the KV pool into account, once the workers know it."""
        self._max_total_tokens = min(self._max_total_tokens, max_total_num_tokens)

    @property
    def num_unfinished(self) -> int:
        """Sequences that clients wait for."""
        return len(self._routes)

    async def run(self) -> None:
        """Route messages for ever."""
        decoder = msgspec.msgpack.Decoder(WorkerMessage)
        while True:
            message = decoder.decode(await self._pull.recv())
            match message:
                case BatchTokenOutput(outputs=outputs):
                    self.last_output_s = time.monotonic()
                    for output in outputs:
                        self._route(output)
                case InternalState(ticket=ticket) | CacheFlushed(ticket=ticket):
                    if (answers := self._answers.get(ticket)) is not None:
                        answers.put_nowait(message)
                case _:
                    self._on_startup_message(message)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        incremental: bool = False,
        logprobs: LogprobParams | None | Sequence[LogprobParams | None] = None,
    ) -> Generation:
        """Start `n` sequences for each prompt; sequence `p * n + i` is the i-th of prompt p.

        `sampling` and `logprobs` are for all prompts, or one for each. Without `incremental` each sequence gives one
        piece, when it ends. A seed is counted up over the `n` sequences of a prompt. Raises `ValueError` for
        parameters out of range and prompts that can never be served.
        """
        samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        logprobs_of = logprobs if isinstance(logprobs, Sequence) else [logprobs] * len(prompts)
        for wanted in logprobs_of:
            if wanted is not None:
                wanted.num_top = min(wanted.num_top, self._vocab_size)
        for params in samplings:
            params.check()
            self._require_in_vocabulary("logit_bias", params.logit_bias)
            self._require_in_vocabulary("stop_token_ids", params.stop_token_ids)
        token_ids = [self._token_ids(prompt) for prompt in prompts]
        rids = [f"{next(self._numbers):x}" for _ in range(len(token_ids) * n)]
        generation = Generation(token_ids, len(rids), lambda: self._abort(rids))
        for index, rid in enumerate(rids):
            prompt, copy = divmod(index, n)
            params = self._seeded(samplings[prompt], copy)
            self._start(generation, index, rid, token_ids[prompt], params, incremental, logprobs_of[prompt])
        return generation

    def _start(
        self,
        generation: Generation,
        index: int,
        rid: str,
        ids: list[int],
        sampling: SamplingParams,
        incremental: bool,
        logprobs: LogprobParams | None,
    ) -> None:
        if sampling.max_new_tokens == 0 and (logprobs is None or logprobs.prompt_start is None):
            generation.put(Piece(index, "", 0, "length"))
            return
        assert self._tokenizer is not None
        self._routes[rid] = generation, SequenceState(index, sampling, self._tokenizer, incremental)
        if self._observer is not None:
            self._observer.started(rid, len(ids))
        # Stop strings end a sequence here, so its text must be known as it grows; an observer wants its times.
        sends_each_token = incremental or bool(sampling.stop) or self._observer is not None
        sampling = msgspec.structs.replace(
            sampling,
            max_new_tokens=min(max(1, sampling.max_new_tokens), self._max_total_tokens),
            top_k=min(sampling.top_k, self._vocab_size),
        )
        num_tokens = min(len(ids) + sampling.max_new_tokens, self._max_total_tokens)
        replica = self._dispatcher.assign(rid, num_tokens)
        self._send(TokenizedRequest(rid, ids, sampling, sends_each_token, replica, logprobs))

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return self._max_total_tokens

    def chat_prompt(self, messages: Sequence[dict[str, Any]], arguments: dict[str, Any]) -> list[int]:
        """Token ids of a conversation; raises `ValueError` when the model's template does not take it."""
        assert self._tokenizer is not None
        return self._tokenizer.encode_chat(messages, arguments, self._max_total_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special tokens included."""
        assert self._tokenizer is not None
        return self._tokenizer.token_text(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids)

    async def internal_states(self, timeout_s: float) -> list[InternalState]:
        """The counts of each attention-DP replica's scheduler now; none when they do not answer within `timeout_s`."""
        answers = await self._ask_replicas(GetInternalState, timeout_s)
        return [answer for answer in answers if isinstance(answer, InternalState)]

    async def flush_cache(self, timeout_s: float) -> bool:
        """Empty the prefix caches; False when a replica has requests, or does not answer within `timeout_s`."""
        answers = await self._ask_replicas(FlushCache, timeout_s)
        return bool(answers) and all(
            isinstance(answer, CacheFlushed) and answer.is_done for answer in answers
        )

    async def _ask_replicas(
        self, question: type[GetInternalState] | type[FlushCache], timeout_s: float
    ) -> list[InternalState | CacheFlushed]:
        """The answers of all attention-DP replicas in their order; none when one does not answer in time."""
        ticket = next(self._numbers)
        answers: asyncio.Queue[InternalState | CacheFlushed] = asyncio.Queue()
        self._answers[ticket] = answers
        self._send(question(ticket))

        async def all_answers() -> list[InternalState | CacheFlushed]:
            return [await answers.get() for _ in range(self._num_replicas)]

        try:
            return sorted(await asyncio.wait_for(all_answers(), timeout_s), key=lambda answer: answer.replica)
        except asyncio.TimeoutError:
            return []
        finally:
            del self._answers[ticket]

    def fail_all(self, message: str) -> None:
        """End every generation with an `EngineError`."""
        for generation in {id(generation): generation for generation, _ in self._routes.values()}.values():
            generation.put(EngineError(message))
        for rid in list(self._routes):
            self._forget(rid)

    def shut_down_workers(self) -> None:
        self._send(Shutdown())

    def close(self) -> None:
        self._pull.close()
        self._push.close()
        self._context.term()

    def _route(self, output: TokenOutput) -> None:
        route = self._routes.get(output.rid)
        if route is None:
            return  # Aborted, while these tokens were on their way.
        generation, state = route
        if self._observer is not None and output.token_ids:
            self._observer.gained(output.rid, len(output.token_ids), output.num_cached_tokens)
        if output.finish_reason == "abort":
            self._forget(output.rid)
            generation.put(EngineError(output.message or "the request was aborted"))
            return
        piece = state.take(output)
        if piece is None:
            return
        if piece.finish_reason is not None:
            self._forget(output.rid, is_complete=True)
            if output.finish_reason is None:
                self._send(AbortRequest(output.rid))
        generation.put(piece)

    def _abort(self, rids: Sequence[str]) -> None:
        for rid in rids:
            if rid in self._routes:
                self._forget(rid)
                self._send(AbortRequest(rid))

    def _forget(self, rid: str, is_complete: bool = False) -> None:
        del self._routes[rid]
        self._dispatcher.release(rid)
        if self._observer is not None:
            self._observer.ended(rid, is_complete)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            assert self._tokenizer is not None
            prompt = self._tokenizer.encode(prompt, self._max_total_tokens)
        else:
            self._require_in_vocabulary("prompt", prompt)
        if not prompt:
            raise ValueError("prompt must have at least one token")
        if len(prompt) >= self._max_total_tokens:
            raise ValueError(
                f"prompt has {len(prompt)} tokens, which leaves no room for output: at most "
                f"{self._max_total_tokens} tokens fit, prompt and output together"
            )
        return prompt

    def _require_in_vocabulary(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ValueError(
                f"{name} has token ids outside the vocabulary, which are 0 to {self._vocab_size - 1}"
            )

    def _seeded(self, sampling: SamplingParams, copy: int) -> SamplingParams:
        """The parameters with a seed of their own: the workers draw nothing themselves, so that all ranks agree."""
        if sampling.seed is None:
            seed = self._seeds.randrange(MAX_SEED)
        else:
            seed = (sampling.seed + copy) & MAX_SEED
        return msgspec.structs.replace(sampling, seed=seed)

    def _send(self, message: MainMessage) -> None:
        # The worker connected before it reported ready, and there is no high-water mark: this never waits.
        self._push.send(self._encoder.encode(message), zmq.NOBLOCK)
