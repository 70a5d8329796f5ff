"""Prometheus metrics of one process, and the merge of all processes' texts into one scrape.

Each process has one registry. The gateway gathers every process's text and joins them with labels naming the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

STAGE_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

REGISTRY: Final = CollectorRegistry()


def metrics_text() -> str:
    """This process's metrics in the Prometheus text format."""
    return generate_latest(REGISTRY).decode()


class _Merged:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def merge_texts(texts: Mapping[tuple[tuple[str, str], ...], str]) -> str:
    """One scrape from many: `{labels of the process: its text}` → a text where every sample carries its process's labels."""
    families: dict[str, Metric] = {}
    for labels, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**dict(labels), **sample.labels}))
    registry = CollectorRegistry()
    registry.register(_Merged(families.values()))
    return generate_latest(registry).decode()
