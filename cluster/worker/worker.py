"""One life of a worker, whichever kind: its engine's thread, its endpoint, its reports, its health and its end.

    start ──► running ──► drain: new calls are refused, the router is told at once
                            ├── the calls end, or the drain's time is up and they are ended
                            └──► close: no report, no endpoint, no engine

A prefill worker's stream stays open as long as its lease, so the calls that are running stand for all leases too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from contextlib import ExitStack
from typing import Final

from cluster.books import ProcessBooks, faults_of, request_ids
from cluster.engine.engine import Engine
from cluster.engine.load import EngineLoad
from cluster.engine.loop import EngineLoop
from cluster.errors import BatonError, InternalError
from cluster.types import WorkerLoad, WorkerState
from cluster.worker.calls import LiveCalls
from cluster.worker.endpoint import Endpoint
from cluster.worker.gate import Gate
from cluster.worker.metrics import LoadCollector
from cluster.worker.reporter import LoadReporter
from cluster.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

_LONG_STEP_S: Final = 0.25
_AUDIT_TIMEOUT_S: Final = 2.0
_LAST_REPORT_S: Final = 0.5  # an idle worker waits so long for the router to hear of its drain


class Worker:
    """What both kinds of workers do; the kinds add their services to `endpoint` before `start`. Make it on the event loop."""

    def __init__(self, settings: WorkerSettings, engine: Engine) -> None:
        self._settings = settings
        self.engine = engine
        self.engine_loop = EngineLoop(engine)
        self.endpoint = Endpoint(settings.host, settings.secret, settings.published_host)
        self.gate = Gate(settings.identity.incarnation)
        self._profile = _profile(settings, engine, self.endpoint.address)
        self.reporter = LoadReporter(self._fresh_load, settings.send, self.gate.learn_epoch)
        self._cleanup = ExitStack()
        self._collector = LoadCollector(self.engine_loop.load)
        self.calls = LiveCalls(self.gate, on_end=self.reporter.wake)

    async def start(self) -> None:
        """Serves from now on."""
        self.engine_loop.start()
        self._settings.registry.register(self._collector)
        self._cleanup.callback(self._settings.registry.unregister, self._collector)
        await self.endpoint.start()
        self.reporter.start()
        _log.info("%s worker %s answers at %s", self._profile.role, self._profile.incarnation, self.endpoint.address)

    def load(self) -> WorkerLoad:
        """What the worker holds, as of its engine's last step."""
        return self._with(self.engine_loop.load())

    async def _fresh_load(self) -> WorkerLoad:
        """What it holds now: what has just been freed counts, unless the engine is in a long step."""
        if self.engine_loop.broken is not None:  # it would fail calls faster than any healthy worker serves them
            self.gate.close()
        try:
            async with asyncio.timeout(_LONG_STEP_S):
                return self._with(await self.engine_loop.run(Engine.load))
        except (TimeoutError, BatonError):
            return self.load()

    def _with(self, load: EngineLoad) -> WorkerLoad:
        return dataclasses.replace(
            self._profile,
            state=self.gate.state,
            num_blocks_free=load.num_blocks_free,
            num_blocks_cached=load.num_blocks_cached,
            num_blocks_owned=load.num_blocks_owned,
            num_blocks_leased=load.num_blocks_leased,
            num_seqs_waiting=load.num_seqs_waiting + load.num_seqs_waiting_for_kv,
            num_seqs_running=load.num_seqs_running,
            num_tokens_waiting=load.num_tokens_waiting,
            live_requests=load.live_keys,
            num_steps=load.num_steps,
            num_tokens_total=load.num_tokens_total,
        )

    async def books(self) -> ProcessBooks:
        """What the worker holds and whether its books are right, checked on the engine's thread; it waits a while for that.

        An engine in a step that may take longer is busy, and only one that stalls is at fault.
        """
        is_busy = False
        try:
            async with asyncio.timeout(_AUDIT_TIMEOUT_S):
                faults, load = await self.engine_loop.run(_audited)
        except TimeoutError:
            stall = self._stall()
            is_busy, faults, load = stall is None, () if stall is None else (stall,), self.engine_loop.load()
        except BatonError as error:
            faults, load = (f"the engine does not answer: {error.message}",), self.engine_loop.load()
        return ProcessBooks(
            kind=self._profile.role.value,
            name=self._profile.incarnation,
            held={
                "blocks_owned": load.num_blocks_owned,
                "blocks_leased": load.num_blocks_leased,
                "slots_swapped": load.num_blocks_swapped,
                "sequences": load.num_seqs_waiting + load.num_seqs_waiting_for_kv + load.num_seqs_running,
                "streams": self.engine_loop.num_streams,
                "calls": len(self.calls),
            },
            faults=faults,
            requests=request_ids(load.live_keys),
            is_busy=is_busy,
        )

    def check_health(self) -> None:
        """Health is progress of our own engine; what happens to a peer never makes us unhealthy.

        Raises:
            InternalError: the engine is broken, or has work and has made no step for too long.
        """
        if self.engine_loop.broken is not None:
            raise InternalError(f"the engine is broken: {self.engine_loop.broken}")
        if (stall := self._stall()) is not None:
            raise InternalError(stall)

    def _stall(self) -> str | None:
        stalled_s = self.engine_loop.seconds_since_progress()
        if stalled_s <= self._settings.pool.stall_timeout_s:
            return None
        return f"the engine has work and made no step for {stalled_s:.1f} s"

    async def drain(self) -> None:
        """Returns when nothing is being served any more: at the latest when the drain's time is up."""
        self.gate.close()
        report = asyncio.create_task(self.reporter.report())
        try:
            async with asyncio.timeout(self._settings.pool.drain_timeout_s):
                await self.calls.wait_idle()
        except TimeoutError:
            _log.warning("drain: ending %d calls that are left", len(self.calls))
            self.calls.abort()
            await self.calls.wait_idle()
        await asyncio.wait({report}, timeout=_LAST_REPORT_S)
        report.cancel()

    async def close(self, grace_s: float = 0.0) -> None:
        """Ends everything: at once, or, after a drain, when the last answers have gone out, within `grace_s`. Idempotent."""
        await self.reporter.stop()
        await self.endpoint.close(grace_s)
        await self.engine_loop.stop()
        self._cleanup.close()


def _audited(engine: Engine) -> tuple[tuple[str, ...], EngineLoad]:
    return faults_of(engine.check_integrity), engine.load()


def _profile(settings: WorkerSettings, engine: Engine, endpoint: str) -> WorkerLoad:
    """The part of the worker's load that never changes."""
    return WorkerLoad(
        worker_id=settings.identity.worker_id,
        incarnation=settings.identity.incarnation,
        role=settings.identity.role,
        state=WorkerState.STARTING,
        endpoint=endpoint,
        node_id=settings.identity.node_id,
        checkpoint=engine.checkpoint,
        domain=engine.domain,
        layout=engine.layout,
        max_model_len=engine.max_model_len,
        num_blocks=engine.num_blocks,
        num_reserved_blocks=engine.limits.num_reserved_blocks,
        max_num_seqs=engine.limits.max_num_seqs,
        max_num_batched_tokens=engine.limits.max_num_batched_tokens,
    )
