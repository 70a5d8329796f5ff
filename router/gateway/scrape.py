"""One Prometheus scrape of every process of the cluster. A deployment that does not answer in time is left out, and counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from cluster.metrics import merge_texts, process_of
from router.gateway.gather import Source, gather
from router.gateway.metrics import GatewayMetrics

_LOG = logging.getLogger(__name__)
_TIMEOUT_S: Final = 3.0


class Scraper:
    """Gathers the texts of all processes at once and merges them."""

    def __init__(self, sources: Mapping[str, Source[str]], metrics: GatewayMetrics, *, timeout_s: float = _TIMEOUT_S) -> None:
        """`sources` give the metrics' texts of a deployment's processes."""
        self._sources = dict(sources)
        self._metrics = metrics
        self._timeout_s = timeout_s

    async def text(self) -> str:
        """Every sample carries its `deployment` and `process`."""
        labelled: dict[tuple[tuple[str, str], ...], str] = {}
        for name, gathered in (await gather(self._sources, self._timeout_s)).items():
            for text in gathered.answers:
                labelled[("deployment", name), ("process", process_of(text))] = text
            for failure in gathered.failures:
                self._metrics.scrape_failures.labels(name).inc()
                _LOG.warning("no metrics from %s: %s", name, failure)
        return await asyncio.to_thread(merge_texts, labelled)
