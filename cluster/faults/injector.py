"""Strikes the points of `points` by the rules of `rules`.

The code has one line at each point. A rule sees each passage of its point and strikes some of them; whether it does follows from the seed,
the worker's role and its number in the pool, the rule and the count of passages, so two runs that pass alike are struck alike. Counts and
chances begin anew with each life of a worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter

from cluster.faults.points import FaultAction, FaultPoint
from cluster.faults.rules import FaultInjectionConfig, FaultRule
from cluster.types import WorkerRole

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class FaultInjector:
    """One worker's faults. Use it on one event loop."""

    def __init__(
        self,
        config: FaultInjectionConfig | None = None,
        *,
        role: WorkerRole = WorkerRole.PREFILL,
        replica: int = 0,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """
        Args:
            config: default: no faults.
            role: of the worker.
            replica: its number in its pool.
            registry: where `baton_injected_faults` is counted, if there are rules.
        """
        self._rules: defaultdict[FaultPoint, list[_Rule]] = defaultdict(list)
        if config is None or not config.rules:
            return
        self._damage_rng = random.Random(f"{config.seed}/{role}/{replica}")
        self._counter = Counter("baton_injected_faults", "faults that the config asked for", ["point", "action"], registry=registry)
        for index, rule in enumerate(config.rules):
            self._rules[rule.point].append(_Rule(rule, random.Random(f"{config.seed}/{role}/{replica}/{index}/{rule.point}")))
        _log.warning("%s", config)

    async def reach(self, point: FaultPoint) -> None:
        """A passage of `point`, where nothing travels that could be corrupted.

        Raises:
            BatonError: `point.lost()`.
        """
        await self._strike(point)

    async def carry(self, point: FaultPoint, message: bytes) -> bytes:
        """A passage of `point` with a message, and what becomes of the message.

        Raises:
            BatonError: `point.lost()`.
        """
        data = bytearray(message)

        def damage(rng: random.Random) -> None:
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)

        await self._strike(point, damage)
        return bytes(data)

    async def arrive(self, point: FaultPoint, blocks: torch.Tensor, rows: Sequence[int]) -> None:
        """A passage of `point` with blocks that have just been written.

        Args:
            point: where.
            blocks: uint8 `[num_rows, block_bytes]`, in host memory.
            rows: of `blocks`, which are those that arrived.

        Raises:
            BatonError: `point.lost()`.
        """

        def damage(rng: random.Random) -> None:
            blocks.numpy()[rng.choice(rows), rng.randrange(blocks.shape[1])] ^= rng.randrange(1, 256)

        await self._strike(point, damage)

    async def _strike(self, point: FaultPoint, damage: Callable[[random.Random], None] | None = None) -> None:
        if point not in self._rules:
            return
        for rule in [rule for rule in self._rules[point] if rule.strikes()]:
            _log.info("injected: %s at %s", rule.action, point)
            self._counter.labels(point, rule.action).inc()
            match rule.action:
                case FaultAction.DELAY:
                    await asyncio.sleep(rule.delay_s)
                case FaultAction.DROP:
                    raise point.lost()
                case FaultAction.KILL:
                    os.kill(os.getpid(), signal.SIGKILL)
                case FaultAction.CORRUPT:
                    assert damage is not None, "the config allows it only where something travels"
                    damage(self._damage_rng)


NO_FAULTS: Final = FaultInjector()


class _Rule:
    """A rule of the config, and how often it has been passed and has struck."""

    def __init__(self, rule: FaultRule, rng: random.Random) -> None:
        self._rule = rule
        self._rng = rng
        self._num_passages = 0
        self._num_struck = 0
        self.action = rule.action
        self.delay_s = rule.delay_s or 0.0

    def strikes(self) -> bool:
        """Whether it strikes the next passage."""
        rule = self._rule
        self._num_passages += 1
        chance = self._rng.random()  # drawn at each passage: a bound shifts no later one
        num_counted = self._num_passages - rule.after
        is_due = num_counted > 0 and num_counted % rule.every == 0 and chance < rule.probability
        if not is_due or self._num_struck == rule.max_count:
            return False
        self._num_struck += 1
        return True
