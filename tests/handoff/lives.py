"""Real workers in one thread and on a `VirtualLoop`: their engines step when told to, and their calls go over a `LocalWire`.

All is real but what would take time of its own: the model (`FakeRunner`, whose KV says whose it is), the engine's thread, the network.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, Final, Self, TypeVar
from unittest.mock import patch

from grpc import aio

from cluster import rpc
from cluster.config import TransferConfig
from cluster.engine.engine import Engine
from cluster.engine.loop import EngineLoop
from cluster.engine.sequence import ScheduledSequence
from cluster.errors import BatonError, ClientGone
from cluster.kv_transfer.base import DataPlane
from cluster.kv_transfer.grpc import GrpcPlane
from cluster.types import TokenOutput, WorkerRole
from cluster.worker.identity import WorkerIdentity
from cluster.worker.settings import WorkerSettings
from cluster.worker.worker import Worker
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.engine.fakes import FakeRunner, Pool, make_engine
from tests.handoff.local_channel import LocalChannel, LocalStream
from tests.handoff.local_server import LocalServer
from tests.handoff.local_wire import LocalWire
from tests.handoff.slow_plane import SlowCopies, SlowPlane
from tests.handoff.virtual_loop import VirtualLoop
from tests.harness import tiny_pool

TRANSFER: Final = TransferConfig(lease_s=30, renew_interval_s=5, max_lease_s=100)
MAX_MODEL_LEN: Final = 32
# So small that prompts wait for leases, decode declines and preempts.
PREFILL_POOL: Final = Pool(num_blocks=10, num_swap_slots=4, max_num_seqs=4, max_num_batched_tokens=6, num_reserved_blocks=1)
DECODE_POOL: Final = Pool(num_blocks=8, num_swap_slots=8, max_num_seqs=3, max_num_batched_tokens=6, num_reserved_blocks=1)

T = TypeVar("T")


class _SteppedEngineLoop(EngineLoop):
    """Without a thread."""

    def start(self) -> None:
        """The test takes its turns."""

    def turn(self) -> bool:
        """What the thread does between two looks at its commands; False when there is nothing to do."""
        has_work = self._refusal is None and bool(self._commands or self._engine.has_work)
        if has_work:
            self._turn()
        return has_work

    async def stop(self) -> None:
        await super().stop()
        self._main()  # what the thread does at its end


class _NoReporter:
    """There is no router."""

    def __init__(self, *_: object) -> None: ...

    def start(self) -> None: ...

    def wake(self) -> None: ...

    async def report(self) -> bool:
        return True

    async def stop(self) -> None: ...


class _WatchedRunner:
    """Keeps what went wrong in a step, since the engine ends the step's sequences and goes on."""

    def __init__(self, runner: FakeRunner, check_row: Callable[[str], None], faults: list[str]) -> None:
        self._runner = runner
        self._check_row = check_row
        self._faults = faults
        self.interrupt = runner.interrupt

    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[TokenOutput | None]:
        try:
            for row in scheduled:
                self._check_row(row.sequence.key)
            return self._runner.run(scheduled)
        except Exception as error:
            self._faults.append(repr(error))
            raise


class Life:
    """One life of a worker."""

    def __init__(self, worker: Worker, address: str, plane: str) -> None:
        self.worker = worker
        self.address = address
        self.plane = plane  # by which it reads, if it does
        self.is_alive = True
        self.ending: asyncio.Task[None] | None = None

    @property
    def incarnation(self) -> str:
        return self.worker.gate.incarnation

    @property
    def engine(self) -> Engine:
        return self.worker.engine

    def turn(self) -> bool:
        """One turn of its engine; False when there is nothing to do."""
        loop = self.worker.engine_loop
        assert isinstance(loop, _SteppedEngineLoop)
        return self.is_alive and loop.turn()


class Leg:
    """A call to a worker as a gateway makes it, and all that it has said."""

    def __init__(self, life: Life, stream: LocalStream, loop: asyncio.AbstractEventLoop) -> None:
        self.life = life
        self.events: list[Any] = []
        self.error: BatonError | None = None
        self.was_cancelled = False
        self._stream = stream
        self._task = loop.create_task(self._read())

    @property
    def is_open(self) -> bool:
        return not self._task.done()

    def cancel(self) -> None:
        self.was_cancelled = True
        self._stream.cancel()

    async def _read(self) -> None:
        try:
            async for event in self._stream:
                self.events.append(event)
        except aio.AioRpcError as failure:
            self.error = rpc.error_of(failure)
        except asyncio.CancelledError:
            self.error = ClientGone("cancelled")


class LocalCluster:
    """Starts workers, and ends them as a kill does. Use it as a context."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.wire = LocalWire()
        self.copies = SlowCopies()
        self.lives: list[Life] = []
        self.faults: list[str] = []  # what must never happen, where no caller would hear of it
        self.check_decode_row: Callable[[str, str], None] = lambda _incarnation, _key: None  # before a step of a decode worker
        self._numbers = itertools.count()
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        make_channel = lambda endpoint, *_: LocalChannel(self.wire, endpoint)  # noqa: E731
        for name, stand_in in (
            ("cluster.worker.worker.Endpoint", self._endpoint),
            ("cluster.worker.worker.EngineLoop", _SteppedEngineLoop),
            ("cluster.worker.worker.LoadReporter", _NoReporter),
            ("cluster.rpc.channel", make_channel),
            ("cluster.kv_transfer.chunks.CHUNK_BYTES", 1),  # a message for each block
        ):
            self._patches.enter_context(patch(name, stand_in))
        return self

    def __exit__(self, *_: object) -> None:
        for task in asyncio.all_tasks(self.loop):  # after a failure alone
            task.cancel()
        while self.copies.pending:
            self.copies.advance(self.copies.pending[0])
        self.loop.settle()
        self._patches.close()
        self.loop.close()

    def alive(self, kind: type[Worker]) -> list[Life]:
        return [life for life in self.lives if life.is_alive and isinstance(life.worker, kind)]

    def start_prefill(self, address: str | None = None) -> Life:
        engine, planes, settings = self._parts(WorkerRole.PREFILL, PREFILL_POOL)
        return self._start(lambda: PrefillWorker(settings, engine, planes), address)

    def start_decode(self, address: str | None = None, *, plane: str = SlowPlane.name) -> Life:
        engine, planes, settings = self._parts(WorkerRole.DECODE, DECODE_POOL)
        return self._start(lambda: DecodeWorker(settings, engine, [one for one in planes if one.name == plane]), address, plane)

    def kill(self, life: Life) -> None:
        """Its engine stops for good, its calls end, its peers lose it; what is being copied is not stopped by that."""
        life.is_alive = False
        life.ending = self.loop.create_task(life.worker.close())
        self.loop.settle()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of something that needs no help to end."""
        task = self.loop.create_task(work)
        self.loop.settle()
        return task.result()

    def open(self, life: Life, stub: Callable[[Any], Any], message: Any) -> Leg:
        """Calls a streaming method of `life` at its address."""
        channel = LocalChannel(self.wire, life.address)

        async def call() -> Leg:
            return Leg(life, stub(channel)(message), self.loop)

        return self.run(call())

    def _parts(self, role: WorkerRole, pool: Pool) -> tuple[Engine, list[DataPlane], WorkerSettings]:
        identity = WorkerIdentity(role.value, f"{role.value}-{len(self.lives)}", role, "node")

        def check_row(key: str) -> None:
            if role is WorkerRole.DECODE:
                self.check_decode_row(identity.incarnation, key)

        engine, _ = make_engine(pool, max_model_len=MAX_MODEL_LEN, wrap=lambda runner: _WatchedRunner(runner, check_row, self.faults))
        storage = engine.kv_cache.storage
        generation = engine._blocks._pool.generation
        planes = [SlowPlane(storage, identity.incarnation, self.copies, generation), GrpcPlane(storage, "secret")]
        return engine, planes, WorkerSettings(identity, tiny_pool(), TRANSFER, "secret", _send)

    def _start(self, make: Callable[[], Worker], address: str | None, plane: str = "") -> Life:
        self._address = address or f"worker:{next(self._numbers)}"

        async def start() -> Worker:
            worker = make()
            await worker.start()
            return worker

        life = Life(self.run(start()), self._address, plane)
        self.lives.append(life)
        return life

    def _endpoint(self, *_: object) -> _LocalEndpoint:
        return _LocalEndpoint(self.wire, self._address)


class _LocalEndpoint:
    def __init__(self, wire: LocalWire, address: str) -> None:
        self.address = address
        self._server = LocalServer(wire, address)

    def add(self, register: Callable[[LocalServer], None]) -> None:
        register(self._server)

    async def start(self) -> None:
        await self._server.start()

    async def close(self, _grace_s: float = 0.0) -> None:
        await self._server.stop()


async def _send(_report: bytes) -> bytes:
    raise AssertionError("nothing is reported")
