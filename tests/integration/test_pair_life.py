"""What two real workers do when something ends early: cancels, leases, restarts, drains. The books balance after each (promise P2)."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from grpc import aio

from cluster import rpc
from cluster.config import TransferConfig
from cluster.errors import Draining, TicketStale, TransferError
from cluster.types import KVPeer, WorkerRole, WorkerState
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.eventually import eventually
from tests.harness import Workers, check_books, error_of, make_request, random_prompt, tiny_pool
from tests.kv_transfer.planes import PLANES
from tests.kv_transfer.process_state import Held, nothing_beyond
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("plane", PLANES)
async def test_cancels_at_random_moments_leave_the_books_balanced(plane: str) -> None:
    rng = random.Random(plane)
    async with Workers(tiny_model("llama"), plane) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        expected = {}  # and channels and mappings are there from now on
        for length in (1, 8, 30, 90):
            answer = await workers.client.disaggregated(prefill, decode, make_request(random_prompt(length)))
            expected[length] = answer.token_ids
        gc.collect()
        fds = num_fds()
        for _ in range(5):
            runs = [asyncio.create_task(interrupted(workers, prefill, decode, rng)) for _ in range(8)]
            await asyncio.gather(*runs)
            await check_books(prefill, decode)
        await eventually(lambda: num_fds() <= fds, timeout_s=5)
        for length in (1, 8, 30, 90):
            request = make_request(random_prompt(length))
            answer = await workers.client.disaggregated(prefill, decode, request)
            assert answer.token_ids == expected[length], "blocks of a request that was left must not show in another"


async def interrupted(workers: Workers, prefill: PrefillWorker, decode: DecodeWorker, rng: random.Random) -> None:
    """One request that its client leaves after some event of either leg, or after a moment of waiting for the next one."""
    request = make_request(random_prompt(rng.choice((1, 8, 30, 90)), rng.randrange(3)), max_tokens=rng.choice((1, 2, 20)))
    num_events, patience_s = rng.randrange(12), rng.random() * 0.02 + rng.choice((0.0, 5.0))
    async with aclosing(workers.client.both_legs(prefill, decode, request)) as events:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                for _ in range(num_events):
                    if await anext(events, None) is None:
                        return


def maps_pool() -> bool:
    """Whether some pool's shared memory is still mapped."""
    return "memfd:baton-kv" in Path("/proc/self/maps").read_text()


def num_fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_a_lease_expires_under_a_reader_who_is_late() -> None:
    async with Workers(tiny_model("llama"), transfer=TransferConfig(lease_s=0.05, renew_interval_s=0.02)) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        request = make_request(random_prompt(40))
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        assert isinstance(await error_of(first.call), TicketStale)
        assert isinstance(await error_of(workers.client.decode(decode, request, first.ticket)), TicketStale)
        await check_books(prefill, decode)


async def test_a_ticket_is_taken_once() -> None:
    async with Workers(tiny_model("llama")) as workers:
        prefill, one, other = await workers.start_prefill(), await workers.start_decode(), await workers.start_decode()
        request = make_request(random_prompt(40))
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        calls = [workers.client.decode(worker, request, first.ticket) for worker in (one, other)]
        results = await asyncio.gather(*(outcome(call) for call in calls))
        assert sorted(results) == ["TicketStale", "taken"]
        await check_books(prefill, one, other)


@pytest.mark.parametrize("plane", PLANES)
async def test_a_ticket_is_stale_for_the_worker_that_took_it(plane: str) -> None:
    async with Workers(tiny_model("llama"), plane=plane) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode(tiny_pool(prefix_caching=False))
        request = make_request(random_prompt(40))
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        results = [await outcome(workers.client.decode(decode, request, first.ticket)) for _ in range(2)]
        assert results == ["taken", "TicketStale"], "its blocks may hold another prompt by now"
        await check_books(prefill, decode)


async def outcome(call: Any) -> str:
    try:
        events = [event async for event in call]
    except aio.AioRpcError as failure:
        return type(rpc.error_of(failure)).__name__
    return str(events[0].WhichOneof("event"))


async def test_a_ticket_of_another_life_is_stale_and_the_decode_worker_stays_well() -> None:
    async with Workers(tiny_model("llama")) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        request = make_request(random_prompt(40))
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        await prefill.close()
        error = await error_of(workers.client.decode(decode, request, first.ticket))
        assert isinstance(error, TransferError)
        decode.check_health()
        await check_books(decode)
        again = make_request(random_prompt(40))
        answer = await workers.client.disaggregated(await workers.start_prefill(), decode, again)
        assert len(answer.outputs) == 16
        await check_books(decode)


async def test_no_room_is_declined_and_the_same_ticket_works_later() -> None:
    pool = tiny_pool(max_num_seqs=1)
    async with Workers(tiny_model("llama")) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode(pool)
        busy, request = make_request(random_prompt(10), max_tokens=500), make_request(random_prompt(40))
        first_busy = await workers.client.first_token(workers.client.prefill(prefill, busy))
        running = workers.client.decode(decode, busy, first_busy.ticket)
        assert (await running.read()).WhichOneof("event") == "taken"
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        assert await outcome(workers.client.decode(decode, request, first.ticket)) == "declined"
        running.cancel()
        await decode.calls.wait_idle()
        assert await outcome(workers.client.decode(decode, request, first.ticket)) == "taken"
        await check_books(prefill, decode)


async def test_a_drain_lets_requests_end_and_takes_no_new_ones() -> None:
    async with Workers(tiny_model("llama")) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        request = make_request(random_prompt(40), max_tokens=60)
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        drains = [asyncio.create_task(prefill.drain())]
        events = aiter(workers.client.decode(decode, request, first.ticket))
        assert (await anext(events)).WhichOneof("event") == "taken", "leases can be taken from a worker that drains"
        await asyncio.wait_for(drains[0], 5)
        drains.append(asyncio.create_task(decode.drain()))
        tokens = [output async for event in events for output in event.tokens.outputs]
        assert len(tokens) == 59
        await asyncio.wait_for(drains[1], 5)
        for call in (workers.client.prefill(prefill, make_request([5])), workers.client.decode(decode, make_request([5]), first.ticket)):
            assert isinstance(await error_of(call), Draining)
        assert {report.role for report in workers.reports if report.state is WorkerState.DRAINING} == {
            WorkerRole.PREFILL,
            WorkerRole.DECODE,
        }
        await check_books(prefill, decode)


async def test_a_drain_ends_what_takes_too_long() -> None:
    pool = tiny_pool(drain_timeout_s=0.1)
    async with Workers(tiny_model("llama"), pool=pool) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        leased = await workers.client.first_token(workers.client.prefill(prefill, make_request(random_prompt(40))))
        request = make_request(random_prompt(10), max_tokens=1000)
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        running = workers.client.decode(decode, request, first.ticket)
        errors = [asyncio.create_task(error_of(call)) for call in (leased.call, running)]
        await first.call.wait_for_connection()
        await asyncio.gather(prefill.drain(), decode.drain())
        assert [type(await error) for error in errors] == [Draining, Draining]
        await check_books(prefill, decode)


async def test_reports_say_what_is_held_and_that_it_is_free_again() -> None:
    async with Workers(tiny_model("llama")) as workers:
        prefill = await workers.start_prefill()
        request = make_request(random_prompt(40))
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        await prefill.reporter.report()
        leased = workers.reports[-1]
        assert (leased.num_blocks_leased, leased.live_requests) == (5, (request.key,))
        assert leased.endpoint == prefill.endpoint.address and leased.num_blocks == prefill.engine.num_blocks
        first.call.cancel()
        async with asyncio.timeout(0.4):  # sooner than the periodic report
            await workers.wait_for_report(lambda report: report.num_blocks_leased == 0 and not report.live_requests)


@pytest.mark.parametrize("plane", PLANES)
async def test_workers_that_have_closed_leave_nothing_behind(plane: str) -> None:
    async def live_once() -> None:
        async with Workers(tiny_model("llama"), plane) as workers:
            prefill, decode = await workers.start_prefill(), await workers.start_decode()
            await workers.client.disaggregated(prefill, decode, make_request(random_prompt(20)))
        del workers, prefill, decode
        gc.collect()  # a pool lives as long as its tensors

    held = Held()
    for _ in range(3):  # gRPC keeps some descriptors for its next use, and not as many each time
        await live_once()
        held |= Held.now()
    await live_once()
    await nothing_beyond(held, timeout_s=5)
    assert not maps_pool()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("engine", "kv-copy", "kv-nccl", "kv-nixl"))]


@pytest.mark.parametrize("plane", PLANES)
def test_a_handoff_on_uvloop_as_in_a_serve_replica(plane: str) -> None:
    async def hand_over() -> None:
        async with Workers(tiny_model("llama"), plane) as workers:
            prefill, decode = await workers.start_prefill(), await workers.start_decode()
            request = make_request(random_prompt(40))
            first = await workers.client.first_token(workers.client.prefill(prefill, request))
            events = [event async for event in workers.client.decode(decode, request, first.ticket)]
            assert events[0].taken.plane == plane
            report = await workers.wait_for_report(lambda report: bool(report.kv_peers))
            assert report.kv_peers == (KVPeer(prefill.load().incarnation, plane, "first of the config"),)
            first.call.cancel()
            await check_books(prefill, decode)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hand_over())
