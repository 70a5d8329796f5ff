"""One Prometheus scrape of every process of the cluster. A deployment that does not answer in time is left out, and counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from cluster.metrics import merge_texts, process_name
from router.gateway.metrics import GatewayMetrics

_LOG = logging.getLogger(__name__)
_TIMEOUT_S: Final = 3.0

Source = Callable[[], Awaitable[Sequence[str | BaseException]]]


class Scraper:
    """Gathers the texts of all processes at once and merges them."""

    def __init__(self, sources: Mapping[str, Source], metrics: GatewayMetrics, *, timeout_s: float = _TIMEOUT_S) -> None:
        """
        Args:
            sources: deployment → the texts of its processes, an exception in place of one that failed.
        """
        self._sources = dict(sources)
        self._metrics = metrics
        self._timeout_s = timeout_s

    async def text(self) -> str:
        """Every sample carries its `deployment` and `process`."""
        answers = await asyncio.gather(*(self._texts(name) for name in self._sources))
        labelled: dict[tuple[tuple[str, str], ...], str] = {}
        for name, texts in zip(self._sources, answers, strict=True):
            for text in texts:
                labelled[("deployment", name), ("process", process_name(text))] = text
        return await asyncio.to_thread(merge_texts, labelled)

    async def _texts(self, name: str) -> list[str]:
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await self._sources[name]()
        except Exception as error:  # whatever happens to one deployment, the scrape shows the others
            answers = [error]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for failure in failures:
            self._metrics.scrape_failures.labels(name).inc()
            _LOG.warning("no metrics from %s: %s", name, str(failure) or type(failure).__name__)
        return [answer for answer in answers if isinstance(answer, str)]
