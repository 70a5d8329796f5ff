"""A worker that is killed at a point of a handoff: its own callers hear of it at once, and the other worker frees what it held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

import pytest

from cluster.errors import NoCapacity, TransferError
from cluster.faults.points import FaultPoint
from cluster.faults.rules import FaultInjectionConfig
from tests.harness import Workers, check_books, make_request
from tests.integration.test_pair_faults import CHECKED, PROMPT, expected_tokens, outcome
from tests.integration.worker_host import WorkerHost
from tests.tiny_models import tiny_model

AT_PREFILL: Final = (FaultPoint.OFFER, FaultPoint.FIRST_TOKEN, FaultPoint.RELEASE)
AT_DECODE: Final = (FaultPoint.FETCH_START, FaultPoint.FETCH_CHUNK, FaultPoint.COMMIT, FaultPoint.DECODE_TAKEN, FaultPoint.DECODE_TOKENS)
SOON_S: Final = 5.0


@pytest.fixture(scope="module")
def host() -> Iterator[WorkerHost]:
    host = WorkerHost()
    yield host
    host.close()


@pytest.mark.parametrize("point", AT_PREFILL)
async def test_prefill_is_killed(host: WorkerHost, point: FaultPoint) -> None:
    folder, rules = tiny_model("llama"), [{"point": point, "action": "kill"}]
    async with Workers(folder, transfer=CHECKED) as workers:
        decode = await workers.start_decode()
        doomed = await asyncio.to_thread(host.start, "prefill", folder, rules)
        async with asyncio.timeout(SOON_S):
            found = await outcome(workers, doomed, decode, make_request(PROMPT))
        assert isinstance(found, NoCapacity)
        assert isinstance(found, TransferError) == (point is FaultPoint.RELEASE), "decode hears of it when it commits"
        await doomed.await_end()
        await check_books(decode)
        assert await outcome(workers, await workers.start_prefill(), decode, make_request(PROMPT)) == await expected_tokens()
        await check_books(decode)


@pytest.mark.parametrize("point", AT_DECODE)
async def test_decode_is_killed(host: WorkerHost, point: FaultPoint) -> None:
    folder, rules = tiny_model("llama"), [{"point": point, "action": "kill"}]
    async with Workers(folder, transfer=CHECKED) as workers:
        prefill = await workers.start_prefill()
        doomed = await asyncio.to_thread(host.start, "decode", folder, rules)
        async with asyncio.timeout(SOON_S):
            found = await outcome(workers, prefill, doomed, make_request(PROMPT))
        assert type(found) is NoCapacity
        await doomed.await_end()
        await check_books(prefill)
        assert await outcome(workers, prefill, await workers.start_decode(), make_request(PROMPT)) == await expected_tokens()
        await check_books(prefill)


async def test_prefill_is_killed_while_its_lease_is_renewed(host: WorkerHost) -> None:
    """The hosted worker's lease is the default, so the reader is told to renew it soon, and to take its time."""
    folder, rules = tiny_model("llama"), [{"point": FaultPoint.LEASE_RENEW, "action": "kill"}]
    transfer = CHECKED.model_copy(update={"renew_interval_s": 0.05})
    slow = [{"point": "fetch.start", "action": "delay", "delay_s": 0.5}]
    async with Workers(folder, transfer=transfer, faults=FaultInjectionConfig.model_validate({"rules": slow})) as workers:
        decode = await workers.start_decode()
        doomed = await asyncio.to_thread(host.start, "prefill", folder, rules)
        async with asyncio.timeout(SOON_S):
            assert isinstance(await outcome(workers, doomed, decode, make_request(PROMPT)), TransferError)
        await doomed.await_end()
        await check_books(decode)
