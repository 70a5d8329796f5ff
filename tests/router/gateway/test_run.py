"""`RequestRun` against workers that offer, decline, fail and stall at every point. After each scenario nothing is left anywhere."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import aclosing

import pytest

from cluster.config import RouterConfig
from cluster.errors import BatonError, DeadlineExceeded, InternalError, NoCapacity
from cluster.types import FinishReason, SamplingParams, WorkerRole
from router.gateway.job import Job
from router.gateway.run import RequestRun
from router.gateway.tokenizer import Tokenizer
from router.gateway.worker_clients import WorkerClients
from tests.eventually import eventually
from tests.router.gateway.fake_workers import ANSWER, NUM_CACHED_TOKENS, Act
from tests.router.gateway.fakes import COLOCATED, FakeCluster, fake_cluster

pytestmark = pytest.mark.usefixtures("overlaps")

TWO_DECODES = (WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.DECODE)
TWO_PREFILLS = (WorkerRole.PREFILL, WorkerRole.PREFILL, WorkerRole.DECODE)


def new_run(
    cluster: FakeCluster, *, max_tokens: int = 8, timeout_s: float = 20.0, max_attempts: int = 3, recomputes: bool = True
) -> RequestRun:
    now_s = time.monotonic()
    job = Job("r1", (5, 6, 7, 8), SamplingParams(max_tokens=max_tokens, seed=9), now_s, now_s + timeout_s)
    return RequestRun(
        job,
        cluster.gateway.book,
        cluster.clients,
        cluster.metrics,
        max_attempts=max_attempts,
        recomputes=recomputes,
        overlaps=cluster.overlaps,
    )


async def read(run: RequestRun) -> tuple[list[int], FinishReason | None]:
    ids: list[int] = []
    reason = None
    async with aclosing(run.tokens()) as chunks:
        async for chunk in chunks:
            ids += [output.token_id for output in chunk.outputs]
            reason = chunk.finish_reason
    return ids, reason


async def test_first_token_from_prefill_and_the_rest_from_decode(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        run = new_run(cluster)
        assert await read(run) == (list(ANSWER[:8]), FinishReason.LENGTH)
        assert run.num_cached_tokens == NUM_CACHED_TOKENS
        assert len(cluster.prefill.requests) == len(cluster.decode.requests) == 1
        assert cluster.prefill.requests == cluster.decode.requests, "both legs are the same request, length controls included"


async def test_a_request_of_one_token_has_no_decode_leg(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        assert await read(new_run(cluster, max_tokens=1)) == ([ANSWER[0]], FinishReason.LENGTH)
        assert cluster.decode.requests == []


async def test_colocated_needs_one_leg_without_ticket(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, COLOCATED) as cluster:
        run = new_run(cluster)
        assert await read(run) == (list(ANSWER[:8]), FinishReason.LENGTH)
        assert run.num_cached_tokens == NUM_CACHED_TOKENS


@pytest.mark.parametrize("act", [Act.REFUSE, Act.WRONG_LIFE, Act.FAIL, Act.OFFER_FAIL])
async def test_a_failure_before_the_first_token_is_tried_on_another_worker(tokenizer: Tokenizer, act: Act) -> None:
    async with fake_cluster(tokenizer, TWO_PREFILLS) as cluster:
        first, second = cluster.workers[:2]
        first.acts = second.acts = deque([act])  # whichever comes first
        ids, _ = await read(new_run(cluster))
        assert ids == list(ANSWER[:8])
        attempts = [request for worker in (first, second) for request in worker.requests]
        assert sorted(request.attempt for request in attempts) == [1, 2]
        assert len({request.order_key for request in attempts}) == 1, "a retry keeps its place in every queue"
        assert {request.sampling.seed for request in attempts} == {9}
        assert len(first.requests) == len(second.requests) == 1, "the worker that failed is left out"


async def test_a_worker_with_another_secret_is_no_fault_of_the_client(tokenizer: Tokenizer) -> None:
    """As while `serve deploy` replaces a cluster whose secret is drawn at each start."""
    async with fake_cluster(tokenizer) as cluster:
        cluster.clients = WorkerClients("another")
        with pytest.raises(NoCapacity, match="refused this gateway"):
            await read(new_run(cluster, max_attempts=1))
        await cluster.clients.close()


async def test_a_stale_epoch_is_not_the_workers_fault(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        cluster.prefill.acts.append(Act.STALE_EPOCH)
        assert (await read(new_run(cluster)))[0] == list(ANSWER[:8])
        assert [request.attempt for request in cluster.prefill.requests] == [1, 2]


async def test_attempts_are_bounded(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        cluster.prefill.acts.extend([Act.STALE_EPOCH] * 5)
        with pytest.raises(NoCapacity):
            await read(new_run(cluster, max_attempts=2))
        assert len(cluster.prefill.requests) == 2


async def test_without_another_worker_one_that_still_reports_is_tried_again(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        cluster.prefill.acts.append(Act.FAIL)
        assert (await read(new_run(cluster)))[0] == list(ANSWER[:8])
        assert [request.attempt for request in cluster.prefill.requests] == [1, 2]


async def test_without_another_worker_the_failure_of_one_that_is_gone_is_no_capacity(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        await eventually(lambda: cluster.router.ready().ready)
        cluster.prefill.acts.append(Act.FAIL)
        cluster.prefill.is_up = False
        with pytest.raises(NoCapacity):
            await read(new_run(cluster))
        assert len(cluster.prefill.requests) == 1


async def test_a_bug_of_a_worker_is_not_tried_on_the_others(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, TWO_PREFILLS) as cluster:
        for worker in cluster.workers[:2]:
            worker.acts.append(Act.BUG)
        with pytest.raises(InternalError):
            await read(new_run(cluster))
        assert sum(len(worker.requests) for worker in cluster.workers) == 1


@pytest.mark.parametrize("act", [Act.DECLINE, Act.REFUSE, Act.FAIL, Act.STALE_EPOCH])
async def test_another_decode_worker_is_asked_for_the_same_ticket(tokenizer: Tokenizer, act: Act) -> None:
    async with fake_cluster(tokenizer, TWO_DECODES) as cluster:
        first, second = cluster.workers[1:]
        first.acts = second.acts = deque([act])  # whichever comes first
        assert (await read(new_run(cluster)))[0] == list(ANSWER[:8])
        assert len(cluster.prefill.requests) == 1, "prefilled once"
        assert first.requests + second.requests == cluster.prefill.requests * 2


async def test_a_lone_decode_worker_is_asked_again_until_it_has_room(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        cluster.decode.acts.extend([Act.DECLINE] * 5)
        assert (await read(new_run(cluster, max_attempts=1)))[0] == list(ANSWER[:8])
        assert len(cluster.decode.requests) == 6
        assert len(cluster.prefill.requests) == 1


async def test_declines_end_with_the_deadline(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        cluster.decode.acts.extend([Act.DECLINE] * 1000)
        with pytest.raises(DeadlineExceeded):
            await read(new_run(cluster, timeout_s=0.3))


@pytest.mark.parametrize(("act", "error"), [(Act.BUG, InternalError), (Act.SOME_END, InternalError)])
async def test_a_bug_after_the_first_token_is_an_error(tokenizer: Tokenizer, act: Act, error: type[BatonError]) -> None:
    async with fake_cluster(tokenizer, TWO_DECODES) as cluster:
        for worker in cluster.workers[1:]:
            worker.acts.append(act)
        with pytest.raises(error):
            await read(new_run(cluster))
        assert sum(len(worker.requests) for worker in cluster.workers[1:]) == 1
        assert len(cluster.prefill.requests) == 1


STALLS = [
    (0, Act.STALL), (0, Act.OFFER_STALL), (1, Act.STALL), (1, Act.TAKEN_STALL), (1, Act.SOME_STALL),
]  # fmt: skip


@pytest.mark.parametrize(("index", "act"), STALLS)
async def test_the_deadline_reaches_every_stage(tokenizer: Tokenizer, index: int, act: Act) -> None:
    async with fake_cluster(tokenizer) as cluster:
        cluster.workers[index].acts.append(act)
        with pytest.raises(DeadlineExceeded):
            await read(new_run(cluster, timeout_s=0.3))


@pytest.mark.parametrize(("index", "act"), STALLS)
async def test_a_cancelled_run_leaves_nothing(tokenizer: Tokenizer, index: int, act: Act) -> None:
    async with fake_cluster(tokenizer) as cluster:
        cluster.workers[index].acts.append(act)
        task = asyncio.create_task(read(new_run(cluster)))
        await cluster.workers[index].stalled.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
async def test_a_reader_that_leaves_between_chunks_leaves_nothing(tokenizer: Tokenizer, num_chunks: int, overlaps: bool) -> None:
    async with fake_cluster(tokenizer) as cluster:
        async with aclosing(new_run(cluster).tokens()) as chunks:
            for _ in range(num_chunks):
                await anext(chunks)
        if num_chunks == 1:
            assert len(cluster.decode.requests) <= int(overlaps), "asked at the offer, or not at all"


async def test_a_run_cancelled_in_the_queue_leaves_it(tokenizer: Tokenizer) -> None:
    patient = RouterConfig(recovery_s=0.0, capacity_wait_s=60.0)
    async with fake_cluster(tokenizer, router=patient, silent=(WorkerRole.DECODE,)) as cluster:
        task = asyncio.create_task(read(new_run(cluster)))
        await eventually(lambda: len(cluster.router.queue) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("roles", [(WorkerRole.PREFILL, WorkerRole.DECODE), COLOCATED])
async def test_stages_add_up(tokenizer: Tokenizer, roles: tuple[WorkerRole, ...], overlaps: bool) -> None:
    async with fake_cluster(tokenizer, roles) as cluster:
        run = new_run(cluster)
        await read(run)
        timings = run.timings
        extra = timings.extra
        first = timings.gateway_s + timings.queue_s + timings.prefill_wait_s + timings.prefill_s + extra["failed_attempts_s"]
        assert extra["ttft_s"] == pytest.approx(first + extra["ttft_unexplained_s"])
        second = extra["handoff_s"] + timings.transfer_s + timings.decode_wait_s + timings.first_step_s + extra["declined_s"]
        assert extra["second_token_s"] == pytest.approx(second + extra["second_token_unexplained_s"])
        assert (timings.prefill_wait_s, timings.prefill_s) == (0.001, 0.002)
        if roles != COLOCATED:
            assert (timings.transfer_s, timings.first_step_s) == (0.003, 0.002)
            if overlaps:  # as much of the decode worker's wait for blocks as the prefill hides is in no stage
                assert 0.001 <= timings.decode_wait_s <= 0.002
            else:
                assert timings.decode_wait_s == 0.002


async def test_a_new_router_learns_the_running_requests(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, TWO_DECODES) as cluster:
        cluster.workers[1].acts = cluster.workers[2].acts = deque([Act.STALL, Act.SERVE])
        task = asyncio.create_task(read(new_run(cluster)))
        await eventually(lambda: any(worker.stalled.is_set() for worker in cluster.workers[1:]))
        cluster.restart_router()
        await eventually(lambda: cluster.router.ready().ready)
        await cluster.gateway.book.heartbeat()
        assert len(cluster.router.live) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_new_router_redirects_what_it_has_never_heard_of(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        async with aclosing(new_run(cluster).tokens()) as chunks:
            ids = [output.token_id for output in (await anext(chunks)).outputs]
            cluster.restart_router()
            cluster.decode.acts.append(Act.DECLINE)
            await eventually(lambda: cluster.router.ready().ready)
            ids += [output.token_id async for chunk in chunks for output in chunk.outputs]
        assert ids == list(ANSWER[:8])
