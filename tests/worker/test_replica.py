"""What Serve asks of a replica, and reports over a Serve handle; Serve itself is in `tests/integration`."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Generator
from typing import Any, Self

import pytest

from cluster.errors import InternalError
from cluster.worker.replica import WorkerReplica, report_over


class FakeWorker:
    def __init__(self) -> None:
        self.log: list[str] = []

    def check_health(self) -> None:
        raise InternalError("no step")

    async def drain(self) -> None:
        self.log.append("drain")

    async def close(self, grace_s: float = 0.0) -> None:
        self.log.append("close" if grace_s else "cut off")


class Replica(WorkerReplica):
    def __init__(self, worker: FakeWorker | None) -> None:
        self._worker = worker  # type: ignore[assignment]


async def destroy(replica: Replica) -> None:
    """As Serve does, which sees to it that nobody calls it again."""
    await replica.__del__()
    replica._worker = None


class FakeHandle:
    """A router's handle, and the response to its one call."""

    def __init__(self) -> None:
        self.payload = b""
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.num_cancels = 0

    @property
    def report(self) -> Self:
        return self

    def options(self, **options: Any) -> Self:
        assert options == {"_by_reference": False}
        return self

    def remote(self, payload: bytes) -> Self:
        self.payload = payload
        return self

    def cancel(self) -> None:
        self.num_cancels += 1

    def __await__(self) -> Generator[Any, None, bytes]:
        return self.reply.__await__()


@pytest.mark.filterwarnings("ignore:coroutine .*__del__:RuntimeWarning")
async def test_the_end_is_a_drain_and_then_a_close() -> None:
    worker = FakeWorker()
    replica = Replica(worker)
    with pytest.raises(InternalError):
        await replica.check_health()
    await destroy(replica)
    assert worker.log == ["drain", "close"]
    del replica
    gc.collect()


@pytest.mark.filterwarnings("ignore:coroutine .*__del__:RuntimeWarning")
async def test_a_replica_whose_constructor_failed_has_nothing_to_end() -> None:
    replica = Replica(None)
    await replica.check_health()
    await destroy(replica)
    del replica
    gc.collect()


async def test_reports_go_and_come_as_bytes() -> None:
    handle = FakeHandle()
    handle.reply.set_result(b"reply")
    assert await report_over(handle)(b"load") == b"reply"
    assert (handle.payload, handle.num_cancels) == (b"load", 0)


async def test_a_report_that_is_given_up_must_not_arrive_later() -> None:
    handle = FakeHandle()
    sending = asyncio.ensure_future(report_over(handle)(b"load"))
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert handle.num_cancels == 1


def test_who_composes_the_application_needs_no_torch() -> None:
    code = "import sys, cluster.worker.replica, cluster.worker.settings, cluster.worker.endpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
