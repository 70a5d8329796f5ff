"""One application for the fault runs: small pools, so that what leaks is missed soon."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.integration.served import Served, serving


@pytest.fixture(scope="package")
def application(serve_url: str) -> Iterator[Served]:
    """Two pools, one worker each."""
    pool = {"kv_cache_bytes": "256MiB"}
    with serving(serve_url, "faults", prefill=pool, decode=pool) as served:
        yield served


@pytest_asyncio.fixture
async def served(application: Served) -> AsyncIterator[Served]:
    """The application, idle; and whatever a test did, its books balance at the end."""
    await application.await_ready()
    yield application
    await application.await_ready()
    await application.await_balance()
