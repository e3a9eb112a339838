"""`sglang.Engine`: the server's engine inside a Python program, without HTTP.

The workers are the server's own. Their request side runs on an event loop in a thread of its own, which also starts
them, so that an engine may be made on any thread and used from any other.

Workers are spawned, and a spawned process imports the main module again: a script makes its engine under
`if __name__ == "__main__":`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import difflib
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from sglang.srt.configs.served_model import read_model_config
from sglang.srt.entrypoints.engine_core import EngineCore
from sglang.srt.entrypoints.engine_status import EngineStatus
from sglang.srt.entrypoints.native.generate import GenerateCall, Output
from sglang.srt.entrypoints.native.protocol import GENERATE_UNBUILT, GenerateRequest
from sglang.srt.entrypoints.openai.body import parse_fields
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.services import Services
from sglang.srt.entrypoints.status_routes import server_info_of
from sglang.srt.flags import flag_fields, flag_name
from sglang.srt.launch_checks import check_launch, warn_of_unknown_ops
from sglang.srt.managers.generation import EngineError
from sglang.srt.managers.ipc import private_endpoints
from sglang.srt.managers.launch_plan import plan_launch
from sglang.srt.server_args import ServerArgs
from sglang.srt.unbuilt_flags import REFUSED, WARNED

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHUTDOWN_WITHIN_S = 15.0
"""How long `shutdown` waits for its thread: more than all the graces that it gives workers together."""


LAST_WORDS_S = 2.0
"""How long calls may take to end at a shutdown."""


class Engine:
    """An engine that is ready to generate when it is made, and a context manager that shuts it down.

    Takes the server's flags as keywords (`--tp-size 2` is `tp_size=2`), or a `ServerArgs` as `server_args`. Raises
    `ValueError` for wrong ones, and `RuntimeError` when the start fails; the reason is then in the log.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **flags: Any) -> None:
        if server_args is not None and flags:
            raise ValueError(f"server_args holds all flags: leave out {', '.join(flags)}")
        self.server_args = server_args or ServerArgs(**{"log_level": "error", **_built(flags)})
        self._model_config = read_model_config(self.server_args)
        check_launch(self.server_args, self._model_config)
        self._plan = plan_launch(self.server_args)
        if len(self._plan.ranks) != self.server_args.world_size:
            raise ValueError("an Engine starts all its ranks itself: use `sglang serve` for several machines")
        warn_of_unknown_ops(self.server_args, self.server_args.moe_runner_backends)
        self._loop = asyncio.new_event_loop()
        self._lock, self._is_over = threading.Lock(), False  # whether the loop takes no more work
        self._started: concurrent.futures.Future[Services] = concurrent.futures.Future()
        self._stop_asked = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="sglang-engine", daemon=True)
        self._thread.start()
        try:
            self._services = self._started.result()
        except BaseException:
            self.shutdown()
            raise
        # A program may end without a word, and multiprocessing then waits for the workers. Registered after it has
        # registered that, so that this comes first.
        atexit.register(self.shutdown)

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Output | list[Output] | Iterator[Output]:
        """What `POST /generate` answers: an output, a list of them for a batch, or with `stream` an iterator.

        `fields` are that endpoint's others (`return_logprob`, `top_logprobs_num`, `rid`, ...). Raises `ValueError` for
        what it refuses, and `RuntimeError` when the engine fails.
        """
        request = self._request(prompt, sampling_params, input_ids, stream, fields)
        return self._stream(request) if stream else self._call(self._answer(request))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Output | list[Output] | AsyncIterator[Output]:
        """`generate` for a caller's event loop; with `stream` it gives an async iterator."""
        request = self._request(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return self._async_stream(request)
        return await asyncio.wrap_future(self._submit(self._answer(request)))

    def get_server_info(self) -> dict[str, Any]:
        """What `GET /server_info` shows, the autotune stage's report under `autotune` included."""
        return self._call(server_info_of(self._services))

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False when requests kept it from being emptied."""
        return self._call(self._services.manager.flush_cache(timeout_s=5.0))

    def shutdown(self) -> None:
        """End requests that run, and the workers. May be called again."""
        atexit.unregister(self.shutdown)
        with self._lock:
            if not self._is_over:
                self._loop.call_soon_threadsafe(self._stop_asked.set)
        self._thread.join(SHUTDOWN_WITHIN_S)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _request(
        self, prompt: Any, sampling_params: Any, input_ids: Any, stream: bool, fields: dict[str, Any]
    ) -> GenerateRequest:
        known = {*GenerateRequest.__struct_fields__, *GENERATE_UNBUILT}
        if unknown := fields.keys() - known:
            raise TypeError(f"generate() has no argument {', '.join(sorted(unknown))}")
        body = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "stream": stream}
        try:
            return parse_fields(body | fields, GenerateRequest, GENERATE_UNBUILT)
        except ApiError as error:
            raise ValueError(error.message) from None

    async def _answer(self, request: GenerateRequest) -> Output | list[Output]:
        try:
            return await self._start_call(request).answer()
        except ApiError as error:
            raise RuntimeError(error.message) from None

    def _start_call(self, request: GenerateRequest) -> GenerateCall:
        if not self._services.status.is_ready:
            raise RuntimeError(f"the engine is {self._services.status.phase}")
        try:
            return GenerateCall(request, self._services.manager)
        except ApiError as error:
            raise ValueError(error.message) from None

    async def _outputs(self, request: GenerateRequest) -> AsyncIterator[Output]:
        async with contextlib.aclosing(self._start_call(request).outputs()) as outputs:
            async for output in outputs:
                yield output

    def _stream(self, request: GenerateRequest) -> Iterator[Output]:
        outputs = self._outputs(request)
        try:
            while (output := self._call(_next(outputs))) is not None:
                yield output
        finally:
            with contextlib.suppress(RuntimeError):  # The engine has ended, and its generators with it.
                self._call(_close(outputs))

    async def _async_stream(self, request: GenerateRequest) -> AsyncIterator[Output]:
        outputs = self._outputs(request)
        try:
            while (output := await asyncio.wrap_future(self._submit(_next(outputs)))) is not None:
                yield output
        finally:
            with contextlib.suppress(RuntimeError):
                await asyncio.wrap_future(self._submit(_close(outputs)))

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run `work` on the engine's loop."""
        with self._lock:
            if not self._is_over:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("the engine has ended")

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: what the caller does not wait for is not generated.
            raise

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            with self._lock:
                self._is_over = True
            self._loop.run_until_complete(_finish_tasks())
            self._loop.close()

    async def _live(self) -> None:
        """The engine's life, on its thread."""
        status, ready = EngineStatus(len(self._plan.ranks)), asyncio.Event()
        with private_endpoints() as endpoints:
            core = EngineCore(
                self.server_args, self._model_config, self._plan, endpoints, status, on_ready=ready.set
            )
            stop = asyncio.ensure_future(self._stop_asked.wait())
            become_ready = asyncio.ensure_future(ready.wait())
            try:
                core.start()
                await _first_of(become_ready, core.failure, stop)
                if core.failure.done():
                    raise RuntimeError(f"the engine did not start: {core.failure.result()}")
                self._started.set_result(
                    Services(self.server_args, status, core.manager, self._model_config.context_length)
                )
                await _first_of(core.failure, stop)
                if core.failure.done():
                    logger.error("The engine ends: %s", core.failure.result())
                await core.stop(hurry=self._stop_asked)
            finally:
                stop.cancel()
                become_ready.cancel()
                await core.close()


def _built(flags: dict[str, Any]) -> dict[str, Any]:
    """`flags` without those that SGLang has and this tree does not, as on the command line."""
    known = [field.name for field, _ in flag_fields(ServerArgs)]
    for name in flags:
        if name not in known and flag_name(name) not in REFUSED | WARNED:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"Engine has no flag {name}" + (f"; did you mean {near[0]}?" if near else ""))
        if flag_name(name) in REFUSED:
            raise ValueError(f"{name} is a flag of SGLang that is not built here: leave it out")
        if flag_name(name) in WARNED:
            logger.warning("%s is a flag of SGLang that is not built here; it is ignored", name)
    return {name: value for name, value in flags.items() if flag_name(name) not in WARNED}


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _finish_tasks() -> None:
    """Let calls that were failed tell their callers, who wait for them in other threads; end the others."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _next(outputs: AsyncIterator[Output]) -> Output | None:
    """The next output; None at the end."""
    try:
        return await anext(outputs, None)
    except EngineError as error:
        raise RuntimeError(str(error)) from None


async def _close(outputs: AsyncIterator[Output]) -> None:
    await outputs.aclose()  # type: ignore[attr-defined]
