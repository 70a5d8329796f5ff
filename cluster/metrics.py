"""Prometheus metrics of one process, and the merge of all processes' texts into one scrape.

Each process has one registry. The gateway gathers every process's text and joins them with labels naming the process: the text itself
says which process it is of, by `baton_process_info`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from cluster.process_state import process_name

STAGE_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter and histogram, which nobody asks for
REGISTRY: Final = CollectorRegistry()
_PROCESS_INFO: Final = Gauge("baton_process_info", "Always 1; names the process", ["process"], registry=REGISTRY)
_PROCESS_LINE: Final = re.compile(r'^baton_process_info\{process="([^"]*)"\} ', re.MULTILINE)


def metrics_text() -> str:
    """This process's metrics in the Prometheus text format."""
    _PROCESS_INFO.labels(process_name()).set(1)
    return generate_latest(REGISTRY).decode()


def process_of(text: str) -> str:
    """The process whose `metrics_text` this is; empty for a text of something else."""
    match = _PROCESS_LINE.search(text)
    return match[1] if match else ""


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
