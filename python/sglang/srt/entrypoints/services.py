"""What the routes work with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sglang.srt.entrypoints.engine_status import EngineStatus
from sglang.srt.entrypoints.metrics import ServingMetrics
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.managers.io_struct import InternalState
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs

STATE_TIMEOUT_S = 2.0
"""How long a route waits for the schedulers, which answer between two forwards."""

ANY_MODEL = "default"
"""The model name of clients that do not care, as SGLang's own examples send it."""


@dataclass
class Services:
    """The engine's status and its request side, and nothing of processes."""

    server_args: ServerArgs
    status: EngineStatus
    manager: TokenizerManager
    context_length: int
    metrics: ServingMetrics | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.server_args.model_name

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that a request may call the model by, the shown one first."""
        return self.model_name, self.server_args.model_path, ANY_MODEL

    def require_ready(self) -> None:
        """Raise `ApiError` 503 unless requests can be served."""
        if not self.status.is_ready:
            raise ApiError(503, f"the server is {self.status.phase}", code="not_ready")

    async def internal_states(self) -> list[InternalState]:
        """The counts of every replica's scheduler; none before the server is ready."""
        return await self.manager.internal_states(STATE_TIMEOUT_S) if self.status.is_ready else []
