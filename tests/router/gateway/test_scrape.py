"""One scrape of many processes, some of which do not answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import metrics_text, process_of
from router.gateway.gather import Source
from router.gateway.metrics import GatewayMetrics
from router.gateway.scrape import Scraper


def text(process: str, value: int) -> str:
    return (
        f'# TYPE baton_process_info gauge\nbaton_process_info{{process="{process}"}} 1.0\n'
        f"# HELP baton_steps_total steps\n# TYPE baton_steps_total counter\nbaton_steps_total {value}.0\n"
    )


def source(*answers: str | BaseException) -> Source[str]:
    async def texts() -> Sequence[str | BaseException]:
        return answers

    return texts


async def stuck() -> Sequence[str | BaseException]:
    await asyncio.Event().wait()
    return []


async def raising() -> Sequence[str | BaseException]:
    raise RuntimeError("the controller is gone")


async def test_every_process_is_in_one_scrape_and_the_silent_are_counted() -> None:
    registry = CollectorRegistry()
    sources = {"Decode": source(text("host-1", 5), text("host-2", 7), RuntimeError("dead")), "Router": stuck, "Prefill": raising}
    merged = await Scraper(sources, GatewayMetrics(registry), timeout_s=0.05).text()
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    samples = {(sample.labels["deployment"], sample.labels["process"]): sample.value for sample in families["baton_steps"].samples}
    assert samples == {("Decode", "host-1"): 5, ("Decode", "host-2"): 7}
    assert families["baton_steps"].type == "counter"
    for name in sources:
        assert registry.get_sample_value("baton_scrape_failures_total", {"deployment": name}) == 1


async def test_counters_and_histograms_survive_the_merge() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.requests.labels("chat", "stop").inc(3)
    metrics.ttft.observe(0.2)
    own = generate_latest(registry).decode()
    merged = await Scraper({"Gateway": source(own)}, GatewayMetrics(CollectorRegistry())).text()

    def samples(scrape: str) -> dict[tuple[str, str], list[tuple[str, float]]]:
        return {(f.name, f.type): [(s.name, s.value) for s in f.samples] for f in text_string_to_metric_families(scrape)}

    assert samples(merged) == samples(own)


def test_a_text_names_its_process() -> None:
    assert process_of(metrics_text()).endswith(f"-{os.getpid()}")
