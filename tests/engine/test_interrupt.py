"""Steps that end early because nobody waits for them: the others lose nothing, and the next step starts where this one did."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress

import pytest
import torch

from cluster.engine.engine import Engine
from cluster.engine.events import Token
from cluster.engine.interrupt import StepInterrupted
from cluster.engine.loop import EngineLoop
from cluster.engine.sequence import ScheduledSequence
from cluster.types import Request, TokenOutput
from tests.engine.drive import Arrival, Drive
from tests.engine.fakes import FakeRunner, Pool, make_engine, make_request
from tests.engine.model_drive import ModelDrive, engine_config
from tests.tiny_models import tiny_model

PROMPT = [(7 * i) % 500 for i in range(150)]
LONG, SHORT = list(range(1, 41)), [3, 4, 5]
MAX_S = 10.0


class StuckRunner:
    """Its first step goes on until it is interrupted or let go; the others are as fast as ever."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self.interrupt = runner.interrupt
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[TokenOutput | None]:
        outputs = self._runner.run(scheduled)
        if not self.entered.is_set():
            self.entered.set()
            deadline_s = time.monotonic() + MAX_S
            while not self.let_go.wait(0.001) and time.monotonic() < deadline_s:
                self.interrupt.check()
            self.interrupt.check()
        return outputs


def stuck_engine(*requests: Request) -> tuple[Engine, StuckRunner]:
    """In whose first step all of `requests` are."""
    engine, _ = make_engine(Pool(max_num_batched_tokens=64), wrap=StuckRunner)
    runner = engine._runner
    assert isinstance(runner, StuckRunner)
    for request in requests:
        engine.add(request, stop_after_first_token=False)
    return engine, runner


@contextmanager
def leaving(engine: Engine, runner: StuckRunner, key: str) -> Iterator[None]:
    """Once a step has begun, nobody waits for `key`; then nothing holds the step up any more."""

    def leave() -> None:
        runner.entered.wait(MAX_S)
        engine.disown(key)
        runner.let_go.set()

    thread = threading.Thread(target=leave)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize(("leaver", "is_interrupted"), [("long", True), ("short", False)])
def test_a_step_ends_when_most_of_it_is_for_nobody(leaver: str, is_interrupted: bool) -> None:
    requests = {"long": make_request("long", LONG), "short": make_request("short", SHORT)}
    engine, runner = stuck_engine(*requests.values())
    with leaving(engine, runner, requests[leaver].key):
        events = engine.step()
    assert {key for key, event in events if isinstance(event, Token)} == (set() if is_interrupted else {r.key for r in requests.values()})
    assert engine.load().num_steps == (0 if is_interrupted else 1)
    engine.check_integrity()


def test_who_stays_makes_the_tokens_that_it_makes_alone() -> None:
    long, short = make_request("long", LONG), make_request("short", SHORT, ignore_eos=True)
    engine, runner = stuck_engine()
    drive = Drive(engine, [Arrival(short, 0), Arrival(long, 0, abort_after=1)])
    with leaving(engine, runner, long.key):
        drive.run()
    assert drive.aborted == {long.key}
    drive.check_outputs(120)
    drive.check_idle()


@pytest.mark.parametrize("leave", ["close", "abort"])
async def test_a_client_that_leaves_frees_its_blocks_before_the_step_would_end(leave: str) -> None:
    engine, runner = stuck_engine()
    loop = EngineLoop(engine)
    loop.start()
    request = make_request("r", LONG)
    started_s = time.monotonic()
    async with aclosing(loop.prefill(request)) as stream:
        await asyncio.to_thread(runner.entered.wait, MAX_S)
        if leave == "abort":
            loop.abort(request.key)
        else:
            await stream.aclose()
        load = await loop.run(Engine.load)
    assert time.monotonic() - started_s < MAX_S
    assert load.num_blocks_owned == load.num_blocks_leased == 0 and load.live_keys == ()
    await loop.stop()


def test_a_key_that_is_in_no_step_interrupts_nothing() -> None:
    request = make_request("r", SHORT)
    engine, runner = stuck_engine(request)
    runner.let_go.set()
    engine.disown("nobody#0")
    engine.disown(request.key)  # between steps: the command that follows it ends the sequence
    engine.step()
    assert engine.load().num_steps == 1


@pytest.mark.parametrize(("kernels", "scheme"), [("native", "int8"), ("native", "int4"), ("torch", "float32")])
def test_a_model_goes_on_where_it_was_interrupted(kernels: str, scheme: str) -> None:
    drive = ModelDrive(tiny_model("llama"), engine_config(scheme, kernels=kernels))
    expected = drive.generate([drive.sequence(PROMPT, max_tokens=4)], chunk=100)
    sequence = drive.sequence(PROMPT, max_tokens=4)
    drive.runner.interrupt.set()
    with pytest.raises(StepInterrupted):
        drive.runner.run([ScheduledSequence(sequence, 100)])
    drive.runner.interrupt.clear()
    assert drive.generate([sequence], chunk=100) == expected


def test_a_native_step_stops_between_layers() -> None:
    """Interrupted at any time, what has been written is overwritten with the same bits."""
    drive = ModelDrive(tiny_model("llama"), engine_config("int8"))
    drive.runner.run([ScheduledSequence(drive.sequence(PROMPT), 150)])  # what is done the first time is done
    started_s = time.monotonic()
    expected = drive.logits([drive.sequence(PROMPT)], [150])
    step_s = time.monotonic() - started_s
    assert expected is not None
    for share in (0.1, 0.3, 0.5, 0.7):
        sequence = drive.sequence(PROMPT)
        timer = threading.Timer(share * step_s, drive.runner.interrupt.set)
        timer.start()
        with suppress(StepInterrupted):
            drive.runner.run([ScheduledSequence(sequence, 150)])
        timer.join()
        drive.runner.interrupt.clear()
        again = drive.logits([sequence], [150])
        assert again is not None and torch.equal(again, expected)
