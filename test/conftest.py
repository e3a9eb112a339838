"""What every test gets: a cache directory of its own, no variables of the caller's, and marks by folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

# Several ranks share few cores here; must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_TEST_DIR = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--time-budget-s",
        type=float,
        default=None,
        help="skip the tests that have not begun after this many seconds",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STARTED_AT] = time.monotonic()


_STARTED_AT: pytest.StashKey[float] = pytest.StashKey()


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget_s = item.config.getoption("--time-budget-s")
    if budget_s is not None and time.monotonic() - item.config.stash[_STARTED_AT] > budget_s:
        pytest.skip(f"the time budget of {budget_s:g} s is spent")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(_TEST_DIR).parts[0] if item.path.is_relative_to(_TEST_DIR) else ""
        if folder in ("native", "faults"):
            item.add_marker(getattr(pytest.mark, folder))
    native = [item for item in items if item.get_closest_marker("native")]
    if native and not _has_gpu():
        for item in native:
            item.add_marker(pytest.mark.skip(reason="needs a GPU of compute capability 9.0 or later"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.fixture(autouse=True)
def isolated_environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No `SGLANG_*` of the caller's, and a cache directory that this test alone uses.

    Nor does FlashInfer find a list of wrong tactics, or the knob cache under the caller's home.
    """
    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        monkeypatch.delenv(name)
    cache_dir = tmp_path_factory.mktemp("sglang-cache")
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(cache_dir))
    monkeypatch.delenv("FLASHINFER_TACTICS_BLOCKLIST", raising=False)
    monkeypatch.setenv("FLASHINFER_MOE_EP_KNOB_CACHE", str(cache_dir / "moe_ep_knob_cache.json"))
    return cache_dir
