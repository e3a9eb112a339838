"""The report as Prometheus metrics.

The values are those of one start and do not change while serving: a collector hands out what the report holds
at the moment of a scrape, so that nothing has to be updated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

PREFIX = "sglang:autotune_"


def register(
    report: Mapping[str, Any] | Callable[[], Mapping[str, Any]], registry: CollectorRegistry
) -> None:
    """Add the metrics of ``report`` to ``registry``, once per registry.

    ``report`` is the document, or gives what stands in its place at the moment of a scrape; while the stage has
    not ended there are no values.
    """
    registry.register(AutotuneCollector(report if callable(report) else lambda: report))


class AutotuneCollector(Collector):
    """See `docs/autotune.md` for the names and labels."""

    def __init__(self, report: Callable[[], Mapping[str, Any]]) -> None:
        self._report = report

    def describe(self) -> list[GaugeMetricFamily]:
        """The metrics without values: registering must not scrape."""
        return list(_families({}))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        report = self._report()
        if report.get("status") in ("completed", "skipped", "failed"):
            yield from _families(report)


def _families(report: Mapping[str, Any]) -> Iterator[GaugeMetricFamily]:
    records = report.get("records") or {}
    for name, text in (
        ("seconds", "Seconds that the autotune stage took at start"),
        ("profiles_tuned", "Profiles that this start tuned"),
        ("fallbacks", "Lookups that no record answers after the stage"),
    ):
        yield GaugeMetricFamily(PREFIX + name, text, value=report.get(name))

    family = GaugeMetricFamily(PREFIX + "status", "1 for how the stage ended", labels=["status"])
    for status in ("completed", "skipped", "failed"):
        family.add_metric([status], float(report.get("status") == status))
    yield family

    family = GaugeMetricFamily(
        PREFIX + "records", "Records in use by where they came from", labels=["source"]
    )
    for source in ("seeded", "user", "given", "tuned"):
        family.add_metric([source], records.get(source, 0))
    yield family

    family = GaugeMetricFamily(
        PREFIX + "records_rejected", "Records that were not used, by what was wrong", labels=["reason"]
    )
    megamoe = report.get("megamoe") or {}
    kinds = Counter(item.get("kind", "other") for item in records.get("rejected", []))
    kinds["megamoe"] += len(megamoe.get("rejected", []))
    for kind in sorted({"file", "environment", "entry", *kinds}):
        family.add_metric([kind], kinds[kind])
    yield family

    family = GaugeMetricFamily(
        PREFIX + "step_ms",
        "Milliseconds of one layer's tunable op, default and tuned; MegaMoE's by capacity",
        labels=["phase", "num_tokens", "kind"],
    )
    for step in report.get("steps", []):
        for kind in ("default", "tuned"):
            if step.get(f"{kind}_ms") is not None:
                family.add_metric([step["phase"], str(step["num_tokens"]), kind], step[f"{kind}_ms"])
    for capacity, winner in (megamoe.get("winners") or {}).items():
        for kind, time_us in (("default", winner.get("default_us")), ("tuned", winner.get("time_us"))):
            if time_us is not None:
                family.add_metric(["megamoe", str(capacity), kind], time_us / 1000)
    yield family

    family = GaugeMetricFamily(
        PREFIX + "megamoe_capacities", "MegaMoE workspaces by where their choice came from", labels=["source"]
    )
    for source in ("tuned", "cached", "kept"):
        family.add_metric([source], megamoe.get(source, 0))
    yield family
