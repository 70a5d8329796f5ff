"""The books of real workers: what they hold in the middle of a request, nothing after it, and a leak that is put in by hand is named."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster.books import ProcessBooks
from cluster.engine.engine import Engine
from cluster.worker import worker as worker_module
from cluster.worker.worker import Worker
from tests.harness import Workers, check_books, make_request, random_prompt, tiny_pool
from tests.tiny_models import tiny_model


async def idle_books(worker: Worker) -> ProcessBooks:
    """Once nothing is held, which is bound to come soon."""
    async with asyncio.timeout(10):
        while any((books := await worker.books()).held.values()):  # noqa: ASYNC110  # gRPC ends a call in its own time
            await asyncio.sleep(0.01)
    return books


async def test_a_lease_and_a_sequence_are_held_and_told_by_request() -> None:
    async with Workers(tiny_model("llama")) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        request = make_request(random_prompt(40), max_tokens=1000)
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        leased = await prefill.books()
        assert (leased.kind, leased.name) == ("prefill", prefill.gate.incarnation)
        assert (leased.requests, leased.faults) == ((request.request_id,), ())
        expected = {"blocks_leased": 5, "calls": 1, "leases": 1}
        assert {name: number for name, number in leased.held.items() if number} == expected
        running = workers.client.decode(decode, request, first.ticket)
        assert (await running.read()).WhichOneof("event") == "taken"
        decoding = await decode.books()
        assert (decoding.kind, decoding.peers) == ("decode", (prefill.gate.incarnation,))
        assert (decoding.requests, decoding.faults) == ((request.request_id,), ())
        assert decoding.held["blocks_owned"] >= 5
        assert [decoding.held[name] for name in ("sequences", "streams", "calls", "handoffs")] == [1, 1, 1, 0]
        running.cancel()
        for worker in (prefill, decode):
            books = await idle_books(worker)
            assert (books.requests, books.faults) == ((), ())
        await check_books(prefill, decode)


async def test_a_colocated_worker_is_its_own_kind() -> None:
    async with Workers(tiny_model("llama")) as workers:
        alone = await workers.start_colocated()
        await workers.client.colocated(alone, make_request([1, 2, 3]))
        books = await idle_books(alone)
        assert (books.kind, books.peers) == ("colocated", ())


async def test_a_block_that_nobody_owns_is_a_fault() -> None:
    async with Workers(tiny_model("llama")) as workers:
        prefill = await workers.start_prefill()
        block_id = await prefill.engine_loop.run(lambda engine: engine._blocks._pool.take())
        books = await prefill.books()
        assert books.faults == (f"of the blocks and slots, {block_id} has 1 references and 0 holders",)
        assert books.held["blocks_owned"] == 1


async def test_a_lease_that_cannot_end_is_a_fault() -> None:
    async with Workers(tiny_model("llama")) as workers:
        prefill = await workers.start_prefill()
        request = make_request(random_prompt(10))
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        lease = prefill.outbox._leases[request.key]
        assert lease.timer is not None
        lease.timer.cancel()
        lease.timer = None
        [fault] = (await prefill.books()).faults
        assert request.key in fault
        first.call.cancel()
        await check_books(prefill)


@pytest.mark.parametrize("stall_timeout_s", [60.0, 0.01])
async def test_an_engine_in_a_long_step_is_busy_and_one_that_stalls_is_at_fault(
    monkeypatch: pytest.MonkeyPatch, stall_timeout_s: float
) -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def hang(_engine: Engine) -> None:
        stuck.set()
        go_on.wait()

    async with Workers(tiny_model("llama")) as workers:
        worker = await workers.start_colocated(tiny_pool(stall_timeout_s=stall_timeout_s))
        hanging = asyncio.create_task(worker.engine_loop.run(hang))
        await asyncio.to_thread(stuck.wait)
        with monkeypatch.context() as patch:
            patch.setattr(worker_module, "_AUDIT_TIMEOUT_S", 0.05)
            books = await worker.books()
        go_on.set()
        assert books.is_busy is (stall_timeout_s == 60)
        assert [fault.startswith("the engine has work and made no step for") for fault in books.faults] == [True] * (not books.is_busy)
        await hanging
        books = await worker.books()
        assert (books.faults, books.is_busy) == ((), False)
        await worker.engine_loop.stop()
        assert (await worker.books()).faults == ("the engine does not answer: the engine has stopped",)
