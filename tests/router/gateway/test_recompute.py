"""What becomes of a request whose worker fails after its first token: the same text goes on, or, by the config, an error."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.config import RouterConfig
from cluster.errors import BatonError, InternalError, NoCapacity, TransferError
from cluster.types import FinishReason, WorkerRole
from router.gateway.tokenizer import Tokenizer
from tests.eventually import eventually
from tests.router.gateway.fake_workers import ANSWER, NUM_CACHED_TOKENS, Act
from tests.router.gateway.fakes import COLOCATED, fake_cluster
from tests.router.gateway.test_run import TWO_DECODES, TWO_PREFILLS, new_run, read

pytestmark = pytest.mark.usefixtures("overlaps")

WHOLE = (list(ANSWER[:8]), FinishReason.LENGTH)
AFTER_FIRST_TOKEN = [(Act.TICKET_STALE, TransferError), (Act.TAKEN_FAIL, NoCapacity), (Act.SOME_FAIL, NoCapacity)]


@pytest.mark.parametrize("act", [act for act, _ in AFTER_FIRST_TOKEN])
async def test_the_same_text_goes_on(tokenizer: Tokenizer, act: Act) -> None:
    async with fake_cluster(tokenizer, TWO_DECODES) as cluster:
        first, second = cluster.workers[1:]
        first.acts = second.acts = deque([act])  # whichever comes first
        run = new_run(cluster)
        assert await read(run) == WHOLE, "nothing repeated, nothing lost"
        assert run.num_cached_tokens == NUM_CACHED_TOKENS
        failed, resumed = sorted(first.requests + second.requests, key=lambda request: request.attempt)
        num_out = 3 if act is Act.SOME_FAIL else 1
        assert (failed.generated_token_ids, resumed.generated_token_ids) == ((), ANSWER[:num_out])
        assert [request.attempt for request in cluster.prefill.requests] == [1, 2]
        assert failed.order_key == resumed.order_key and failed.sampling == resumed.sampling


@pytest.mark.parametrize(("act", "error"), AFTER_FIRST_TOKEN)
async def test_where_the_config_says_fail_it_is_an_error(tokenizer: Tokenizer, act: Act, error: type[BatonError]) -> None:
    async with fake_cluster(tokenizer, TWO_DECODES) as cluster:
        for worker in cluster.workers[1:]:
            worker.acts.append(act)
        with pytest.raises(error):
            await read(new_run(cluster, recomputes=False))
        assert sum(len(worker.requests) for worker in cluster.workers[1:]) == 1
        assert len(cluster.prefill.requests) == 1


async def test_one_worker_that_does_both(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, COLOCATED) as cluster:
        cluster.workers[0].acts.append(Act.SOME_FAIL)
        assert await read(new_run(cluster)) == WHOLE
        assert [request.generated_token_ids for request in cluster.workers[0].requests] == [(), ANSWER[:2]]


async def test_a_worker_that_dies_mid_stream(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, TWO_DECODES) as cluster:
        first, second = cluster.workers[1:]
        first.acts = second.acts = deque([Act.SOME_STALL])
        task = asyncio.create_task(read(new_run(cluster)))
        stalls = [asyncio.create_task(worker.stalled.wait()) for worker in (first, second)]
        await asyncio.wait(stalls, return_when=asyncio.FIRST_COMPLETED)
        for stall in stalls:
            stall.cancel()
        await (first if first.stalled.is_set() else second).stop()
        assert await task == WHOLE


async def test_a_lease_that_is_lost_between_the_legs(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, TWO_PREFILLS) as cluster:
        first, second = cluster.workers[:2]
        first.acts = second.acts = deque([Act.FIRST_FAIL])
        cluster.decode.acts.extend([Act.DECLINE] * 20)  # nobody takes the KV before its lease is lost
        assert await read(new_run(cluster)) == WHOLE
        assert (len(first.requests), len(second.requests)) == (1, 1), "the worker that failed is left out"


async def test_a_placement_that_ends_while_its_kv_waits_for_a_worker(tokenizer: Tokenizer) -> None:
    """As when the decode worker that died reports as another life: all placements on the life before end."""
    async with fake_cluster(tokenizer, router=RouterConfig(recovery_s=0.0, capacity_wait_s=5.0)) as cluster:
        cluster.decode.acts.extend([Act.DECLINE] * 3)
        task = asyncio.create_task(read(new_run(cluster)))
        await eventually(lambda: len(cluster.decode.requests) == 2)
        cluster.decode.address = replace(cluster.decode.address, incarnation="the next life")
        assert await task == WHOLE


async def test_tokens_in_between_are_progress(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        cluster.decode.acts.extend([Act.SOME_FAIL] * 5)
        assert (await read(new_run(cluster, max_tokens=16, max_attempts=2)))[0] == list(ANSWER[:16])
        assert [len(request.generated_token_ids) for request in cluster.decode.requests] == [0, 3, 5, 7, 9, 11]


async def test_failures_without_progress_are_bounded(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        cluster.decode.acts.extend([Act.TAKEN_FAIL] * 9)
        with pytest.raises(NoCapacity):
            await read(new_run(cluster, max_attempts=3))
        assert len(cluster.decode.requests) == 3


async def test_another_first_token_than_before_is_our_bug(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        cluster.decode.acts.append(Act.SOME_FAIL)
        async with aclosing(new_run(cluster).tokens()) as chunks:
            await anext(chunks)
            cluster.prefill.answer = ANSWER[1:]
            with pytest.raises(InternalError, match="another token"):
                async for _ in chunks:
                    pass


@pytest.mark.parametrize("roles", [(WorkerRole.PREFILL, WorkerRole.DECODE), COLOCATED])
@pytest.mark.parametrize("act", [Act.TAKEN_FAIL, Act.SOME_FAIL])
async def test_the_lost_time_is_accounted_for(tokenizer: Tokenizer, roles: tuple[WorkerRole, ...], act: Act) -> None:
    async with fake_cluster(tokenizer, roles) as cluster:
        cluster.workers[-1].acts.append(act)
        run = new_run(cluster)
        await read(run)
        timings, extra = run.timings, run.timings.extra
        first = timings.gateway_s + timings.queue_s + timings.prefill_wait_s + timings.prefill_s + extra["failed_attempts_s"]
        assert extra["ttft_s"] == pytest.approx(first + extra["ttft_unexplained_s"])
        second = extra["handoff_s"] + timings.transfer_s + timings.decode_wait_s + timings.first_step_s + extra["declined_s"]
        assert extra["second_token_s"] == pytest.approx(second + extra["second_token_unexplained_s"])
        before_any_token = roles == COLOCATED and act is Act.TAKEN_FAIL
        assert (extra["failed_attempts_s"] > 0, extra["recompute_s"] > 0) == (before_any_token, not before_any_token)
