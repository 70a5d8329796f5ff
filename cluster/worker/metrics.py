"""What a worker shows of its engine to Prometheus: read from the engine's last snapshot when scraped, so nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.engine.load import EngineLoad


class LoadCollector(Collector):
    """Gauges and counters of one engine."""

    def __init__(self, load: Callable[[], EngineLoad]) -> None:
        self._load = load

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        yield _gauge(
            "baton_kv_blocks",
            "KV blocks by state; idle means none owned and none leased",
            "state",
            {
                "free": load.num_blocks_free,
                "cached": load.num_blocks_cached,
                "owned": load.num_blocks_owned,
                "leased": load.num_blocks_leased,
            },
        )
        yield _gauge(
            "baton_seqs",
            "sequences in the engine",
            "state",
            {"waiting": load.num_seqs_waiting, "waiting_for_kv": load.num_seqs_waiting_for_kv, "running": load.num_seqs_running},
        )
        yield GaugeMetricFamily(
            "baton_kv_blocks_swapped", "host slots that hold the KV of preempted sequences", value=load.num_blocks_swapped
        )
        yield GaugeMetricFamily("baton_tokens_waiting", "prompt tokens not computed yet", value=load.num_tokens_waiting)
        yield CounterMetricFamily("baton_steps", "engine steps", value=load.num_steps)
        yield CounterMetricFamily("baton_tokens", "tokens whose KV was computed, of prompts and outputs", value=load.num_tokens_total)
        yield CounterMetricFamily("baton_preemptions", "sequences moved out for others", value=load.num_preemptions)


def _gauge(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value_of_label, value in values.items():
        family.add_metric([value_of_label], value)
    return family
