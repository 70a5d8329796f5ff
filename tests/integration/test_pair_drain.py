"""A prefill worker that is to leave: it stays until its leases are consumed or expired, and no longer than its drain may take."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.config import TransferConfig
from cluster.errors import Draining, TicketStale
from cluster.faults.rules import FaultInjectionConfig
from cluster.worker.replica import WorkerReplica
from cluster.worker.worker import Worker
from tests.eventually import eventually
from tests.harness import Workers, check_books, error_of, make_request, random_prompt, tiny_pool
from tests.integration.test_pair_faults import PROMPT, expected_tokens, outcome
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .*__del__:RuntimeWarning")

SLACK_S = 1.5  # on a machine with more to do


class _Replica(WorkerReplica):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker


async def leave(worker: Worker) -> float:
    """Ends it as Serve does; the seconds that took."""
    replica, started_s = _Replica(worker), time.monotonic()
    await replica.__del__()
    replica._worker = None
    return time.monotonic() - started_s


async def test_a_lease_that_nobody_takes_is_waited_for_until_it_expires() -> None:
    transfer = TransferConfig(lease_s=0.5, renew_interval_s=0.1)
    async with Workers(tiny_model("llama"), transfer=transfer, pool=tiny_pool(drain_timeout_s=20)) as workers:
        prefill = await workers.start_prefill()
        first = await workers.client.first_token(workers.client.prefill(prefill, make_request(PROMPT)))
        started_s = time.monotonic()
        leaving = asyncio.create_task(leave(prefill))
        assert isinstance(await error_of(first.call), TicketStale)
        assert time.monotonic() - started_s > 0.4, "whoever comes in time is served"
        assert await leaving < 0.5 + SLACK_S


async def test_a_lease_that_lives_longer_than_the_drain_may_take_ends_with_it() -> None:
    async with Workers(tiny_model("llama"), pool=tiny_pool(drain_timeout_s=0.5)) as workers:
        prefill = await workers.start_prefill()
        first = await workers.client.first_token(workers.client.prefill(prefill, make_request(PROMPT)))
        leaving = asyncio.create_task(leave(prefill))
        assert isinstance(await error_of(first.call), Draining)
        assert 0.5 <= await leaving < 0.5 + SLACK_S


async def test_renewals_do_not_hold_a_worker_that_is_to_leave() -> None:
    faults = FaultInjectionConfig.model_validate({"rules": [{"point": "fetch.start", "action": "delay", "delay_s": 30}]})
    transfer = TransferConfig(lease_s=1.0, renew_interval_s=0.1)
    async with Workers(tiny_model("llama"), transfer=transfer, pool=tiny_pool(drain_timeout_s=2), faults=faults) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        first = await workers.client.first_token(workers.client.prefill(prefill, request := make_request(PROMPT)))
        reading = asyncio.create_task(error_of(workers.client.decode(decode, request, first.ticket)))
        await asyncio.sleep(1.5)
        assert len(prefill.outbox) == 1, "it is renewed"
        leaving = asyncio.create_task(leave(prefill))
        assert isinstance(await error_of(first.call), Draining)
        assert 2 <= await leaving < 2 + SLACK_S
        reading.cancel()
        await check_books(decode)


async def test_a_prompt_that_has_begun_is_handed_over() -> None:
    prompt = random_prompt(900)
    async with Workers(tiny_model("llama"), pool=tiny_pool(drain_timeout_s=20)) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        expected = (await workers.client.colocated(await workers.start_colocated(), make_request(prompt))).token_ids
        running = asyncio.create_task(outcome(workers, prefill, decode, make_request(prompt)))
        await eventually(lambda: len(prefill.calls) == 1, interval_s=0.001)  # a report may come too late to tell
        assert not running.done()
        took_s = await leave(prefill)
        assert await running == expected
        assert took_s < 10, "it does not wait for the text"
        await check_books(decode)


async def test_the_answer_to_the_last_commit_goes_out() -> None:
    """The commit ends the lease and so the drain, before its own answer is on its way: here it takes a while."""
    faults = FaultInjectionConfig.model_validate({"rules": [{"point": "release", "action": "delay", "delay_s": 0.5}]})
    async with Workers(tiny_model("llama"), faults=faults) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        call = workers.client.prefill(prefill, request := make_request(PROMPT))
        first = await workers.client.first_token(call)
        leaving = asyncio.create_task(leave(prefill))
        tokens = [first.event.output.token_id]
        async for event in workers.client.decode(decode, request, first.ticket):
            tokens += [output.token_id for output in event.tokens.outputs]
        assert tokens == await expected_tokens()
        assert await anext(first.rest, None) is None, "its stream ends well"
        assert await leaving < 0.5 + SLACK_S
        await check_books(decode)
