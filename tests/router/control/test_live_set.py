"""Random lives of a cluster: whatever happens in whatever order, claims are the sum over what is live, and no credit is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.types import AdmitRequest, WorkerLoad, WorkerRole
from router.control.claims import GROWTH_TOKENS
from router.control.messages import Heartbeat, LiveRequest, Phase
from tests.router.control.builders import Cluster, load, request, settle

WORKERS = {"p1": WorkerRole.PREFILL, "p2": WorkerRole.PREFILL, "d1": WorkerRole.DECODE, "d2": WorkerRole.DECODE}
GATEWAYS = ("g", "h")
EXPECTED = {WorkerRole.PREFILL: 2, WorkerRole.DECODE: 2}


class RandomLives(RuleBasedStateMachine):
    """The test plays gateways and workers. `running` is what a gateway would say of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.cluster = Cluster(EXPECTED, max_queued_requests=12, gateway_timeout_s=100.0, report_timeout_s=8.0)
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.requests: dict[str, AdmitRequest] = {}
        self.phases: dict[str, Phase] = {}
        self.lives = dict.fromkeys(WORKERS, 1)
        self.steps = 0
        self.old_reports: list[WorkerLoad] = []
        self.dead_gateways: set[str] = set()

    # ---- the cluster's side

    def _report_of(self, name: str) -> WorkerLoad:
        """The truth: the worker holds what gateways believe to be on it."""
        self.steps += 1
        incarnation = f"{name}#{self.lives[name]}"
        held = [rid for rid in self._placed() if incarnation in self._where(rid)]
        small = WORKERS[name] is WorkerRole.DECODE
        return load(
            name,
            WORKERS[name],
            incarnation=incarnation,
            num_blocks=40,
            num_reserved_blocks=4,
            max_num_seqs=4,
            num_steps=self.steps,
            live_requests=tuple(f"{rid}/1" for rid in held),
            num_seqs_running=len(held),
            num_blocks_owned=sum(-(-(self.requests[rid].num_prompt_tokens + small) // 16) for rid in held),
            num_tokens_waiting=0 if small else sum(self.requests[rid].num_prompt_tokens for rid in held),
        )

    def _placed(self) -> list[str]:
        return [rid for rid in self.phases if self._is_placed(rid)]

    def _is_placed(self, rid: str) -> bool:
        task = self.tasks[rid]
        return task.done() and not task.cancelled() and task.exception() is None

    def _where(self, rid: str) -> tuple[str, ...]:
        placement = self.tasks[rid].result()
        decode = placement.decode.incarnation
        return (decode,) if self.phases[rid] is Phase.DECODE else (placement.prefill.incarnation, decode)

    def _run(self) -> None:
        self.loop.run_until_complete(settle())
        for rid, task in list(self.tasks.items()):
            if task.done() and not self._is_placed(rid):
                self.phases.pop(rid, None)

    def _forget_what_died(self, incarnation: str) -> None:
        for rid in [rid for rid in self._placed() if incarnation in self._where(rid)]:
            del self.phases[rid]

    def _report_all(self) -> None:
        for name in WORKERS:
            self.cluster.report(self._report_of(name))
        self._run()

    # ---- rules

    @initialize()
    def start(self) -> None:
        self._report_all()

    @rule(
        number=st.integers(0, 30),
        tokens=st.integers(1, 300),
        output=st.integers(1, 100),
        priority=st.integers(-2, 2),
        gateway=st.sampled_from(GATEWAYS),
    )
    def admit(self, number: int, tokens: int, output: int, priority: int, gateway: str) -> None:
        rid = f"r{number}"
        self.requests[rid] = request(rid, tokens, output, priority=priority, gateway_id=gateway)
        self.dead_gateways.discard(gateway)

        async def start() -> None:
            self.tasks[rid] = self.cluster.admit(self.requests[rid])[0]

        self.loop.run_until_complete(start())
        self.phases[rid] = Phase.PREFILL
        self._run()

    @rule(number=st.integers(0, 30))
    def prefill_done(self, number: int) -> None:
        rid = f"r{number}"
        self.cluster.router.prefill_done(rid)
        if rid in self._placed():
            self.phases[rid] = Phase.DECODE
        self._run()

    @rule(number=st.integers(0, 30))
    def finish(self, number: int) -> None:
        self.phases.pop(f"r{number}", None)
        self.cluster.router.finish(f"r{number}")
        self._run()

    @rule(number=st.integers(0, 30))
    def cancel(self, number: int) -> None:
        task = self.tasks.get(f"r{number}")
        if task is not None and not task.done():
            task.cancel()
        self._run()

    @rule(name=st.sampled_from(sorted(WORKERS)))
    def report(self, name: str) -> None:
        self.old_reports.append(self._report_of(name))
        self.cluster.report(self.old_reports[-1])
        self._run()

    @rule(data=st.data())
    def late_report(self, data: st.DataObject) -> None:
        if self.old_reports:
            self.cluster.report(data.draw(st.sampled_from(self.old_reports)))
            self._run()

    @rule(name=st.sampled_from(sorted(WORKERS)))
    def worker_restarts(self, name: str) -> None:
        self._forget_what_died(f"{name}#{self.lives[name]}")
        self.lives[name] += 1
        self.cluster.report(self._report_of(name))
        self._run()

    @rule(gateway=st.sampled_from(GATEWAYS))
    def heartbeat(self, gateway: str) -> None:
        self.dead_gateways.discard(gateway)
        mine = [rid for rid in self._placed() if self.requests[rid].gateway_id == gateway]
        entries = tuple(LiveRequest(self.requests[rid], self.tasks[rid].result(), self.phases[rid]) for rid in mine)
        self.cluster.router.heartbeat(Heartbeat(gateway, tuple(mine), entries))
        self._run()

    @rule(gateway=st.sampled_from(GATEWAYS))
    def gateway_dies(self, gateway: str) -> None:
        other = next(name for name in GATEWAYS if name != gateway)
        for _ in range(5):
            self.cluster.clock.advance(25.0)
            self.heartbeat(other)
            self._report_all()
            self.cluster.router.sweep()
            self._run()
        self.phases = {rid: phase for rid, phase in self.phases.items() if self.requests[rid].gateway_id != gateway}
        self._run()

    @rule(seconds=st.floats(0.0, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.cluster.clock.advance(seconds)
        self.cluster.router.sweep()
        self._run()

    # ---- what always holds

    @invariant()
    def the_live_set_is_what_gateways_hold(self) -> None:
        router = self.cluster.router
        assert router.faults() == ()
        assert {entry.request_id for entry in router.live} == set(self._placed())
        queued = {item.request_id for item in router.queue}
        assert queued == {rid for rid, task in self.tasks.items() if not task.done()}
        assert router.queue.num_tokens == sum(self.requests[rid].num_prompt_tokens for rid in queued)

    @invariant()
    def claims_are_the_sum_over_the_live_placements(self) -> None:
        live = self.cluster.router.live
        for name in WORKERS:
            incarnation = f"{name}#{self.lives[name]}"
            mine = {rid for rid in self._placed() if incarnation in self._where(rid)}
            assert {entry.request_id for entry in live.on(incarnation)} == mine

    @invariant()
    def decode_workers_are_never_overcommitted(self) -> None:
        for name, role in WORKERS.items():
            mine = [self.requests[rid] for rid in self._placed() if f"{name}#{self.lives[name]}" in self._where(rid)]
            assert len(mine) <= 4
            if role is WorkerRole.DECODE:
                assert sum(-(-(each.num_prompt_tokens + min(each.max_tokens, GROWTH_TOKENS)) // 16) for each in mine) <= 36

    def teardown(self) -> None:
        """Whatever came before: once the requests end, all that waits is placed, in order, and nothing is left."""
        for _ in range(200):
            self._report_all()
            if not len(self.cluster.router.queue):
                break
            head = self.cluster.router.queue.head()
            for rid in self._placed():
                self.phases.pop(rid)
                self.cluster.router.finish(rid)
            self._report_all()
            assert head is not None
            assert head.payload.future.done(), "credit was lost: the head is not placed on an idle cluster"
        assert len(self.cluster.router.queue) == 0
        for rid in self._placed():
            self.cluster.router.finish(rid)
        assert len(self.cluster.router.live) == 0
        self._run()
        self.loop.close()


TestRandomLives = RandomLives.TestCase
TestRandomLives.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_reentry_keeps_what_is_known() -> None:
    """A heartbeat's entry never overwrites a younger placement of the same request."""
    cluster = Cluster()
    cluster.report(load("p", WorkerRole.PREFILL), load("d"))
    first = asyncio.run(cluster.router.admit(request("r")))
    known = cluster.router.live.get("r")
    old = replace(first, router_epoch=0)
    cluster.router.heartbeat(Heartbeat("g", ("r",), (LiveRequest(request("r"), old, Phase.DECODE),)))
    assert cluster.router.live.get("r") is known
