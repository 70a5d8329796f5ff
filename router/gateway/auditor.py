"""The books of every process of the cluster: `GET /v1/cluster/books`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cluster.books import ClusterBooks, ProcessBooks
from cluster.wire import WireError, decode
from router.gateway.gather import Gathered, Source, gather

_TIMEOUT_S: Final = 5.0


class Auditor:
    """Gathers the books of all processes at once."""

    def __init__(self, sources: Mapping[str, Source[bytes]], *, timeout_s: float = _TIMEOUT_S) -> None:
        """`sources` give the `ProcessBooks` of a deployment's processes, as msgpack."""
        self._sources = dict(sources)
        self._timeout_s = timeout_s

    async def books(self) -> ClusterBooks:
        """Never raises: what did not come is missing."""
        processes: list[ProcessBooks] = []
        missing: dict[str, str] = {}
        for name, gathered in (await gather(self._sources, self._timeout_s)).items():
            try:
                processes += (decode(ProcessBooks, answer) for answer in gathered.answers)
            except WireError as error:
                missing[name] = str(error)
            if reason := _reason(gathered):
                missing[name] = reason
        return ClusterBooks(tuple(processes), missing)


def _reason(gathered: Gathered[bytes]) -> str | None:
    if gathered.failures:
        num_asked = len(gathered.answers) + len(gathered.failures)
        return f"{len(gathered.failures)} of {num_asked} did not answer: {'; '.join(gathered.failures)}"
    return None if gathered.answers else "no replica is running"
