"""What a gateway counts and measures: every request ends with exactly one outcome, every first token with one TTFT."""

from __future__ import annotations

from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.metrics import REGISTRY, STAGE_BUCKETS_S
from cluster.types import StageTimings

_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_STAGES = tuple(item.name.removesuffix("_s") for item in fields(StageTimings) if item.name != "extra")


class GatewayMetrics:
    """The gateway's metrics, in one registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.requests = Counter(
            "baton_requests",
            "Requests by how they ended: stop, length, client_gone or the code of the error",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.live_calls: set[object] = set()
        live = Gauge("baton_gateway_live_requests", "Requests that have not ended", registry=registry)
        live.set_function(lambda: len(self.live_calls))
        self.retries = Counter(
            "baton_retries",
            "Attempts after the first, and tickets taken to another decode worker, by reason",
            ["reason"],
            registry=registry,
        )
        self.prompt_tokens = Counter("baton_prompt_tokens", "Tokens of the prompts of requests that got a first token", registry=registry)
        self.cached_tokens = Counter("baton_cached_prompt_tokens", "Of these, tokens whose KV was cached at prefill", registry=registry)
        self.output_tokens = Counter("baton_output_tokens", "Generated tokens", registry=registry)
        self.ttft = Histogram("baton_ttft_seconds", "Arrival of the request to its first token", buckets=STAGE_BUCKETS_S, registry=registry)
        self.itl = Histogram("baton_itl_seconds", "Between tokens of one request", buckets=_ITL_BUCKETS_S, registry=registry)
        self.e2e = Histogram(
            "baton_e2e_seconds", "Arrival to last token, of requests that finished", buckets=STAGE_BUCKETS_S, registry=registry
        )
        self.stages = Histogram("baton_stage_seconds", "Time of a request by stage", ["stage"], buckets=STAGE_BUCKETS_S, registry=registry)
        self.exposed_transfer = Histogram(
            "baton_exposed_transfer_seconds",
            "First to second token but for the decode step, of requests whose KV was handed over: what the handoff costs a reader",
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self.scrape_failures = Counter(
            "baton_scrape_failures", "Processes whose metrics did not come in time", ["deployment"], registry=registry
        )

    def observe_stages(self, timings: StageTimings) -> None:
        """One finished request's stages."""
        for stage in _STAGES:
            self.stages.labels(stage).observe(getattr(timings, f"{stage}_s"))
        if timings.transfer_s and (exposed_s := timings.extra.get("exposed_transfer_s")) is not None:
            self.exposed_transfer.observe(exposed_s)
