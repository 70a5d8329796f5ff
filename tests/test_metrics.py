"""One scrape from many processes, read back with Prometheus's own parser."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Summary, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import REGISTRY, STAGE_BUCKETS_S, merge_texts, metrics_text


def text_of(fill: Callable[[CollectorRegistry], None]) -> str:
    registry = CollectorRegistry()
    fill(registry)
    return generate_latest(registry).decode()


def families(text: str) -> dict[str, Metric]:
    found = list(text_string_to_metric_families(text))
    assert len({family.name for family in found}) == len(found), "a family is announced twice"
    return {family.name: family for family in found}


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = [sample for family in families(text).values() for sample in family.samples]
    by_key = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    assert len(by_key) == len(found), "a sample appears twice"
    return by_key


def process(steps: int, seconds: float) -> str:
    def fill(registry: CollectorRegistry) -> None:
        Counter("baton_steps", "Steps.", registry=registry).inc(steps)
        Counter("baton_ends", "Ends.", ["reason"], registry=registry).labels("taken").inc(2 * steps)
        Gauge("baton_kv_blocks", "Blocks.", ["state"], registry=registry).labels("free").set(seconds)
        Histogram("baton_ttft_s", "TTFT.", buckets=STAGE_BUCKETS_S, registry=registry).observe(seconds)
        Summary("baton_size", "Sizes.", registry=registry).observe(seconds)
        Info("baton_build", "Build.", registry=registry).info({"version": "1"})

    return text_of(fill)


PREFILL = (("worker", "p0"), ("role", "prefill"))
DECODE = (("worker", "d0"), ("role", "decode"))


def test_every_sample_of_every_process_once() -> None:
    texts: dict[tuple[tuple[str, str], ...], str] = {PREFILL: process(3, 0.2), DECODE: process(5, 0.7)}
    merged = samples(merge_texts(texts))
    expected = {
        (name, labels | frozenset(process_labels)): value
        for process_labels, text in texts.items()
        for (name, labels), value in samples(text).items()
    }
    assert merged == expected


def test_types_and_help_survive() -> None:
    merged = families(merge_texts({PREFILL: process(3, 0.2), DECODE: process(5, 0.7)}))
    for name, family in families(process(1, 1.0)).items():
        assert (merged[name].type, merged[name].documentation) == (family.type, family.documentation)
    assert merged["baton_steps"].type == "counter"
    assert merged["baton_ttft_s"].type == "histogram"


def test_counters_keep_their_total() -> None:
    text = merge_texts({PREFILL: process(3, 0.2)})
    assert "# TYPE baton_steps_total counter" in text
    assert 'baton_steps_total{role="prefill",worker="p0"} 3.0' in text
    assert "_total_total" not in text


def test_merging_a_merge_changes_nothing() -> None:
    once = merge_texts({PREFILL: process(3, 0.2), DECODE: process(5, 0.7)})
    assert samples(merge_texts({(): once})) == samples(once)


def test_families_that_only_one_process_has() -> None:
    one = text_of(lambda registry: Gauge("a", "A.", registry=registry).set(1))
    two = text_of(lambda registry: Gauge("b", "B.", registry=registry).set(2))
    assert set(families(merge_texts({PREFILL: one, DECODE: two}))) == {"a", "b"}


def test_awkward_label_values_and_help() -> None:
    value = 'quote " backslash \\ newline \n end \\n'
    help_text = 'a \\ b "c" \n d'

    def fill(registry: CollectorRegistry) -> None:
        Gauge("g", help_text, ["l"], registry=registry).labels(value).set(float("inf"))

    merged = families(merge_texts({(("worker", value),): text_of(fill)}))
    (sample,) = merged["g"].samples
    assert sample.labels == {"worker": value, "l": value}
    assert sample.value == float("inf")
    assert merged["g"].documentation == help_text


def test_a_process_that_died_or_said_nothing() -> None:
    assert merge_texts({}) == ""
    assert samples(merge_texts({PREFILL: "", DECODE: process(5, 0.7)})) == samples(merge_texts({DECODE: process(5, 0.7)}))


def test_own_text_parses() -> None:
    families(metrics_text())
    assert isinstance(REGISTRY, CollectorRegistry)
