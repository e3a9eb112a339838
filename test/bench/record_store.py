"""Print how long the record file takes to write and to load: `python test/bench/record_store.py [N]`."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS
from sglang.srt.autotune.records.record import Record, StepEntry
from sglang.srt.autotune.records.store import RecordStore

ENVIRONMENT = {name: "1" for name in ENVIRONMENT_FIELDS}
POLICY = ("cuda_graph_profile_replays", None, "l2_cache_policy", "hot")
EXTRAS = "(torch.bfloat16, torch.bfloat16, 8, 1, 0, 1, 0, 1, 0, False, True)"


def make_record(number: int) -> Record:
    op, bucket = f"trtllm::fused_moe::gemm{number % 2 + 1}", number // 2 + 1
    key = f"('{op}', 'MoERunner', (({bucket}, 2048), (128, 1536, 2048), (0,), (0,)), {EXTRAS})"
    return Record(key, "MoERunner", (number, 128, False), POLICY, source="tuned", tuned_ms=0.5)


def main(num_records: int = 1000) -> None:
    records = [make_record(number) for number in range(num_records)]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "records.json")
        store = RecordStore(path, ENVIRONMENT)
        began = time.perf_counter()
        store.commit(
            records, steps=[StepEntry(f"decode:{i}", (record.key,)) for i, record in enumerate(records)]
        )
        print(f"write {num_records} records: {1e3 * (time.perf_counter() - began):.1f} ms")
        times_ms = []
        for _ in range(10):
            began = time.perf_counter()
            loaded = RecordStore(path, ENVIRONMENT).load()
            times_ms.append(1e3 * (time.perf_counter() - began))
        assert len(loaded.records) == num_records
        print(f"load {num_records} records: {statistics.median(times_ms):.1f} ms (median of {len(times_ms)})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
