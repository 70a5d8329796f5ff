"""The engine behind asyncio: streams, early ends, failures. Nothing here sleeps to wait for something."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from cluster.engine.engine import Engine
from cluster.engine.event_stream import EventStream
from cluster.engine.events import Allocated, Computed, EngineEvent, Failed, Token
from cluster.engine.loop import EngineLoop
from cluster.errors import ClientGone, Draining, InternalError, InvalidRequest
from cluster.types import FinishReason, Request, TokenOutput
from tests.engine.drive import write_kv
from tests.engine.fakes import FakeRunner, Pool, generate_alone, make_engine, make_request

PROMPT = list(range(10, 21))
POOL = Pool()


@asynccontextmanager
async def running(pool: Pool = POOL) -> AsyncIterator[tuple[EngineLoop, FakeRunner]]:
    engine, runner = make_engine(pool)
    loop = EngineLoop(engine)
    loop.start()
    try:
        yield loop, runner
    finally:
        await loop.stop()


async def read(stream: EventStream) -> list[EngineEvent]:
    return [event for events in [batch async for batch in stream] for event in events]


def tokens(events: list[EngineEvent]) -> list[int]:
    return [event.output.token_id for event in events if isinstance(event, Token)]


async def check_idle(loop: EngineLoop) -> None:
    await loop.run(Engine.check_integrity)
    load = await loop.run(Engine.load)
    assert load.num_blocks_owned == load.num_blocks_leased == 0 and load.live_keys == ()


async def test_many_generate_at_once() -> None:
    async with running(Pool(num_blocks=20, max_num_seqs=4)) as (loop, _):
        requests = [make_request(f"r{i}", [i, *PROMPT], 12, ignore_eos=True) for i in range(8)]
        results = await asyncio.gather(*(read(loop.generate(request)) for request in requests))
        for request, events in zip(requests, results, strict=True):
            assert isinstance(events[0], Allocated)
            kinds = [type(event) for event in events]
            assert kinds == sorted(kinds, key=[Allocated, Computed, Token].index)
            assert tokens(events) == generate_alone(request, 120)[0]
            assert isinstance(events[-1], Token) and events[-1].finish_reason is FinishReason.LENGTH
        await check_idle(loop)
        assert loop.load().num_steps > 0


async def test_prefill_ends_with_a_lease_that_decode_takes_over() -> None:
    request = make_request("r", PROMPT, 12, ignore_eos=True)
    async with running() as (prefill, _), running() as (decode, _):
        events = await read(prefill.prefill(request))
        first = events[-1]
        assert isinstance(first, Token) and first.finish_reason is None
        assert prefill.load().num_blocks_leased == 3
        reservation = await decode.reserve(request, "fake", len(PROMPT))
        assert reservation is not None and len(reservation.block_ids) == 3 and reservation.num_cached_blocks == 0
        assert decode.load().num_seqs_waiting_for_kv == 1
        await decode.run(lambda engine: write_kv(engine, reservation, request.prompt_token_ids))
        prefill.release_lease(request.key)
        prefill.release_lease(request.key)
        assert tokens([first]) + tokens(await read(decode.decode(reservation, first.output))) == generate_alone(request, 120)[0]
        await check_idle(prefill)
        await check_idle(decode)


async def test_closing_a_stream_early_aborts() -> None:
    async with running() as (loop, _):
        async with aclosing(loop.generate(make_request("r", PROMPT, 100, ignore_eos=True))) as stream:
            await anext(stream)
        await check_idle(loop)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_closing_before_the_first_read_aborts() -> None:
    async with running() as (loop, _):
        await loop.generate(make_request("r", PROMPT, 100, ignore_eos=True)).aclose()
        await check_idle(loop)


async def test_cancelling_the_reader_aborts() -> None:
    async with running() as (loop, _):
        stream = loop.generate(make_request("r", PROMPT, 100, ignore_eos=True))
        task = asyncio.ensure_future(read(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await check_idle(loop)


async def test_closing_a_prefill_before_its_token_is_read_ends_the_lease_too() -> None:
    async with running() as (loop, _):
        stream = loop.prefill(make_request("r", PROMPT, 10, ignore_eos=True))
        await _until(loop, lambda engine: engine.load().num_blocks_leased == 3)
        await stream.aclose()
        await check_idle(loop)


async def test_closing_a_prefill_after_its_token_keeps_the_lease() -> None:
    async with running() as (loop, _):
        async with aclosing(loop.prefill(make_request("r", PROMPT, 10, ignore_eos=True))) as stream:
            async for events in stream:
                if isinstance(events[-1], Token):
                    break
        assert (await loop.run(Engine.load)).num_blocks_leased == 3
        loop.abort("r/0")
        await check_idle(loop)


async def test_abort_from_outside_ends_the_stream() -> None:
    async with running() as (loop, _):
        stream = loop.generate(make_request("r", PROMPT, 100, ignore_eos=True))
        await anext(stream)
        loop.abort("r/0")
        loop.abort("r/0")
        with pytest.raises(ClientGone):
            await read(stream)
        await check_idle(loop)


async def test_a_key_in_use_is_refused_and_its_owner_not_disturbed() -> None:
    request = make_request("r", PROMPT, 40, ignore_eos=True)
    async with running() as (loop, _):
        stream, again, closed = loop.generate(request), loop.generate(request), loop.prefill(request)
        await closed.aclose()
        with pytest.raises(InvalidRequest, match="in use"):
            await read(again)
        await again.aclose()
        assert tokens(await read(stream)) == generate_alone(request, 120)[0]


async def test_cancelled_reserve_leaves_nothing() -> None:
    async with running() as (loop, _):
        async with held(loop):
            task = asyncio.ensure_future(loop.reserve(make_request("r", PROMPT), "fake", len(PROMPT)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await check_idle(loop)


async def test_decode_of_an_aborted_reservation_raises() -> None:
    async with running() as (loop, _):
        reservation = await loop.reserve(make_request("r", PROMPT), "fake", len(PROMPT))
        assert reservation is not None
        loop.abort(reservation.key)
        with pytest.raises(ClientGone):
            await read(loop.decode(reservation, TokenOutput(1)))
        await check_idle(loop)


async def test_first_token_that_ends_the_sequence_frees_the_reservation() -> None:
    async with running() as (loop, _):
        for token_id in (7, 1_000):  # EOS, and out of the vocabulary
            reservation = await loop.reserve(make_request(f"r{token_id}", PROMPT), "fake", len(PROMPT))
            assert reservation is not None
            with pytest.raises(InvalidRequest):
                await read(loop.decode(reservation, TokenOutput(token_id)))
        await check_idle(loop)


async def test_a_failed_step_ends_its_own_sequences_only() -> None:
    async with running(Pool(max_num_batched_tokens=len(PROMPT))) as (loop, runner):
        failing, request = make_request("a", PROMPT, 10), make_request("b", PROMPT, 10, ignore_eos=True)
        async with held(loop):
            streams = loop.generate(failing), loop.generate(request)
            runner.raises = [RuntimeError("out of luck")]
        ended, whole = await asyncio.gather(*map(read, streams))
        assert isinstance(ended[-1], Failed) and "out of luck" in ended[-1].message
        assert tokens(whole) == generate_alone(request, 120)[0]
        assert loop.broken is None
        await check_idle(loop)


async def test_steps_that_keep_failing_break_the_engine() -> None:
    async with running(Pool(max_num_batched_tokens=len(PROMPT))) as (loop, runner):
        async with held(loop):
            streams = [loop.generate(make_request(name, PROMPT)) for name in "abcd"]
            runner.raises = [RuntimeError("dead device")] * 3
        results = await asyncio.gather(*map(read, streams), return_exceptions=True)
        assert [isinstance(result, InternalError) for result in results] == [False, False, True, True]
        assert loop.broken is not None and "dead device" in loop.broken
        assert loop.seconds_since_progress() == 0.0
        with pytest.raises(InternalError):
            await loop.run(Engine.load)
        with pytest.raises(InternalError):
            await read(loop.generate(make_request("late", PROMPT)))
        loop.abort("a/0")


async def test_a_bug_outside_the_model_breaks_the_engine() -> None:
    async with running() as (loop, runner):
        async with held(loop):
            streams = [loop.generate(make_request(name, PROMPT)) for name in "ab"]
            runner.drops_outputs = True
        for result in await asyncio.gather(*map(read, streams), return_exceptions=True):
            assert isinstance(result, InternalError)
        assert loop.broken is not None


async def test_a_bug_in_a_command_reaches_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: Engine, request: Request, *, stop_after_first_token: bool) -> None:
        raise RuntimeError("a bug")

    async with running() as (loop, _):
        monkeypatch.setattr(Engine, "add", fail)
        async with asyncio.timeout(5):
            with pytest.raises(InternalError, match="a bug"):
                await read(loop.generate(make_request("r", PROMPT)))
            with pytest.raises(InternalError):
                await loop.run(Engine.load)
        assert loop.broken is not None


async def test_stop_ends_streams_and_refuses_what_comes_later() -> None:
    async with running() as (loop, _):
        with pytest.raises(ValueError, match="the caller's own"):
            await loop.run(_raise)
        async with held(loop):
            stream, pending = loop.generate(make_request("r", PROMPT, 100, ignore_eos=True)), asyncio.ensure_future(loop.run(Engine.load))
            await asyncio.sleep(0)
            stopping = asyncio.ensure_future(loop.stop())
            await asyncio.sleep(0)
        await stopping
        for refused in (read(stream), pending, loop.run(Engine.load), read(loop.prefill(make_request("s", PROMPT)))):
            with pytest.raises(Draining):
                await refused
        loop.release_lease("r/0")
        await loop.stop()


async def test_a_step_in_progress_shows_in_the_progress_stamp() -> None:
    async with running() as (loop, _), held(loop):
        before = loop.seconds_since_progress()
        assert loop.seconds_since_progress() >= before > 0.0
    assert loop.seconds_since_progress() == 0.0


def test_a_reader_whose_event_loop_is_gone_is_aborted() -> None:
    engine, _ = make_engine()
    loop = EngineLoop(engine)

    async def leave_without_closing() -> None:
        loop.start()
        async with held(loop):
            loop.generate(make_request("r", PROMPT, 100, ignore_eos=True))

    async def look() -> None:
        await _until(loop, lambda engine: not engine.load().live_keys)
        await check_idle(loop)
        await loop.stop()

    asyncio.run(leave_without_closing())
    asyncio.run(look())


def _raise(engine: Engine) -> None:
    raise ValueError("the caller's own")


@asynccontextmanager
async def held(loop: EngineLoop) -> AsyncIterator[None]:
    """The engine's thread stands still inside a command: what is posted meanwhile runs in one go."""
    gate, entered = threading.Event(), threading.Event()

    def wait(engine: Engine) -> None:
        entered.set()
        gate.wait()

    task = asyncio.ensure_future(loop.run(wait))
    await asyncio.to_thread(entered.wait)
    try:
        yield
    finally:
        gate.set()
    await asyncio.gather(task, return_exceptions=True)


async def _until(loop: EngineLoop, condition: Callable[[Engine], bool]) -> None:
    while not await loop.run(condition):
        pass
