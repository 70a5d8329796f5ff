"""NIXL's own ways to go wrong, beside what every plane must do: peers that stop, agents that do not answer, a library that is not there."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import os
import signal
import socket
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from cluster import wire
from cluster.errors import PlaneUnavailable, TransferError
from cluster.kv_transfer import nixl, nixl_library
from cluster.kv_transfer.base import PeerDescription
from cluster.kv_transfer.nixl import NixlPlane
from cluster.kv_transfer.nixl_reader import NixlPool, NixlReader
from cluster.kv_transfer.selection import PlaneContext, publish, select_planes
from tests.eventually import eventually
from tests.kv_transfer.owner import CHECKPOINT, SECRET, SMALL, Owner
from tests.kv_transfer.planes import HOST, NEEDS_NIXL
from tests.kv_transfer.process_state import Held, listening_addresses, nothing_beyond, shm_files
from tests.kv_transfer.remote_owner import RemoteOwner


async def description(owner: Owner, **changes: object) -> PeerDescription:
    """Of an owner that has not started, with another pool than its own if `changes` say so."""
    pool = wire.decode(NixlPool, (await publish([owner.plane]))["nixl"])
    fields = {name: getattr(pool, name) for name in NixlPool.__slots__} | changes
    return PeerDescription("", owner.incarnation, SMALL, CHECKPOINT, "domain", {"nixl": wire.encode(NixlPool(**fields))})


@pytest.fixture
async def tcp_owner(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RemoteOwner]:
    """Bytes come by sockets, as from another host: shared memory reads on from a process that stands still."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    owner = await RemoteOwner.start("nixl")
    yield owner
    await owner.close()


@NEEDS_NIXL
class TestPeer:
    async def test_that_stops_during_a_read(self, tcp_owner: RemoteOwner, monkeypatch: pytest.MonkeyPatch) -> None:
        await tcp_owner.check_stop_ends_a_read(monkeypatch, "cluster.kv_transfer.nixl._STALL_S")

    async def test_that_stops_does_not_hold_a_cancelled_read(self, tcp_owner: RemoteOwner) -> None:
        await tcp_owner.check_stop_holds_no_cancelled_read(nixl._STALL_S)  # it need not wait for that

    async def test_that_is_killed_during_a_read_over_tcp(self, tcp_owner: RemoteOwner) -> None:
        await tcp_owner.read()
        reading = asyncio.create_task(tcp_owner.read())
        tcp_owner.process.signal(signal.SIGKILL)
        async with asyncio.timeout(20):
            await asyncio.wait([reading])
            with pytest.raises(TransferError):
                await tcp_owner.read()
        assert reading.exception() is None or isinstance(reading.exception(), TransferError)
        await eventually(lambda: len(tcp_owner.peers) == 0)
        assert shm_files() == []
        await tcp_owner.check_nothing_is_written_any_more()

    async def test_whose_agent_has_another_name(self) -> None:
        async with _Pair() as (owner, plane):
            peer = await description(owner, agent="owner-another")
            with pytest.raises(PlaneUnavailable, match="is not that of incarnation"):
                await plane.connect(peer)

    async def test_whose_token_lies_elsewhere(self) -> None:
        async with _Pair() as (owner, plane):
            with pytest.raises(PlaneUnavailable, match="cannot be read"):
                await plane.connect(await description(owner, token=bytes(16)))

    async def test_that_never_answers_costs_other_peers_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")
        async with _Pair() as (owner, plane), _Pair() as (mute, _):
            link = await plane.connect(await description(owner))
            monkeypatch.setattr(nixl, "_STALL_S", 0.3)
            make_agent = nixl_library.make_agent
            silent = lambda name, host, progress: make_agent(name, host, progress=False)  # noqa: E731
            monkeypatch.setattr("cluster.kv_transfer.nixl.make_agent", silent)
            with pytest.raises(PlaneUnavailable, match="sent nothing"):
                await plane.connect(await description(mute))
            destination = torch.zeros(2, SMALL.block_bytes, dtype=torch.uint8)
            await link.read(owner.lease([3, 1]), [0, 1], destination, [0, 1])
            assert torch.equal(destination, owner.pool[[3, 1]])
            await link.close()


@NEEDS_NIXL
class TestAgentOfAReadThatFailed:
    """Any call to it may bring the bytes that the READ waited for; its end aborts the process."""

    @pytest.fixture
    def agents(self, monkeypatch: pytest.MonkeyPatch) -> list[_CountingAgent]:
        """The reading ones, as they are made."""
        made: list[_CountingAgent] = []
        make_agent = nixl_library.make_agent

        def make(name: str, host: str, *, progress: bool) -> _CountingAgent:
            made.append(_CountingAgent(make_agent(name, host, progress=progress)))
            return made[-1]

        monkeypatch.setattr("cluster.kv_transfer.nixl_reader.make_agent", make)
        return made

    async def test_is_never_called_again_and_never_ends(self, agents: list[_CountingAgent]) -> None:
        async with _Pair() as (owner, plane), _Pair() as (other, _):
            link = await plane.connect(await description(owner))
            agent = agents[-1]
            await owner.close()
            destination = torch.zeros(64, SMALL.block_bytes, dtype=torch.uint8)
            with pytest.raises(TransferError):
                while True:  # its first may still find the pool as it was
                    await link.read(owner.lease(range(64)), range(64), destination, range(64))
            num_calls, is_alive = agent.num_calls, weakref.ref(agent)
            del agent
            agents.clear()
            await link.close()
            await (await plane.connect(await description(other))).read(other.lease([1]), [0], destination, [0])
        gc.collect()
        kept = is_alive()
        assert kept is not None and kept.num_calls == num_calls

    async def test_is_ended_if_all_its_reads_came_to_an_end(self, agents: list[_CountingAgent]) -> None:
        async with _Pair() as (owner, plane):
            link = await plane.connect(await description(owner))
            is_alive = weakref.ref(agents.pop())
            await link.close()
            assert is_alive() is None


@NEEDS_NIXL
async def test_an_agent_that_does_not_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    may_end, close = threading.Event(), NixlReader.close
    monkeypatch.setattr(nixl, "_CLOSE_S", 0.3)
    monkeypatch.setattr(NixlReader, "close", lambda reader: (may_end.wait(), close(reader)))
    async with _Pair() as (owner, plane):
        await plane.connect(await description(owner))
        async with asyncio.timeout(5):
            await plane.close()
        with pytest.raises(TransferError, match="stopped"):
            await plane.connect(await description(owner))
        may_end.set()
    assert caplog.messages == ["NIXL's agents have not ended within 0.3 s: they are left to the end of the process"]
    await eventually(lambda: "kv-nixl" not in [thread.name for thread in threading.enumerate()])


class _CountingAgent:
    """Says how often it was called."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(self._agent, name)


@NEEDS_NIXL
class TestDestination:
    async def test_any_tensor_of_blocks(self) -> None:
        async with _Pair() as (owner, plane):
            link = await plane.connect(await description(owner))
            ticket = owner.lease(range(64))
            for num_blocks in (64, 7, 64):
                staging = torch.zeros(num_blocks, SMALL.block_bytes, dtype=torch.uint8)
                rows = range(num_blocks)
                for _ in range(2):
                    await link.read(ticket, rows, staging, rows)
                assert torch.equal(staging, owner.pool[:num_blocks])
            await link.close()

    async def test_a_closed_link_fails_and_leaves_the_others(self) -> None:
        async with _Pair() as (owner, plane), _Pair() as (other, _):
            first, second = await plane.connect(await description(owner)), await plane.connect(await description(other))
            before = Held.now()
            await first.close()
            await first.close()
            destination = torch.zeros(1, SMALL.block_bytes, dtype=torch.uint8)
            with pytest.raises(TransferError):
                await first.read(owner.lease([1]), [0], destination, [0])
            await second.read(other.lease([1]), [0], destination, [0])
            assert torch.equal(destination[0], other.pool[1])
            await nothing_beyond(before)
            await second.close()


class TestLibrary:
    def test_that_is_not_installed_is_said_once(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("nixl") else find_spec(name))
        pool = torch.zeros(1, SMALL.block_bytes, dtype=torch.uint8)
        planes = select_planes(["nixl", "grpc"], PlaneContext(pool, "incarnation", HOST, SECRET))
        assert [plane.name for plane in planes] == ["grpc"]
        assert caplog.messages == ["no nixl plane: the package nixl is not installed"]

    def test_that_cannot_be_loaded_is_a_reason_for_another_plane(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(name: str) -> None:
            raise ImportError(f"{name}: libsomething.so is missing")

        monkeypatch.setattr(importlib, "import_module", fail)
        with pytest.raises(PlaneUnavailable, match=r"nixl_cu12\._api: libsomething\.so is missing"):
            nixl_library.make_agent("unmade", HOST, progress=False)

    @NEEDS_NIXL
    @pytest.mark.parametrize(("host", "is_loopback"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)])
    def test_ports_stay_on_loopback_with_the_worker(self, host: str, is_loopback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")
        monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
        environment, before = dict(os.environ), listening_addresses()
        agent = nixl_library.make_agent("listener", host, progress=False)
        opened = listening_addresses() - before
        assert opened, "UCX_TLS did not count"
        if is_loopback:
            assert set(opened) == {"127.0.0.1"}
        elif len(socket.if_nameindex()) > 1:
            assert not set(opened) <= {"127.0.0.1"}
        assert dict(os.environ) == environment, "processes that start later may have another host"
        del agent

    @NEEDS_NIXL
    def test_leaves_logging_as_it_was(self) -> None:
        nixl_library.make_agent("quiet", HOST, progress=False)
        assert logging.raiseExceptions
        assert not logging.getLogger("nixl").handlers


class _Pair:
    """An owner, and a plane that reads from it."""

    async def __aenter__(self) -> tuple[Owner, NixlPlane]:
        self._owner = Owner("nixl")
        self._plane = NixlPlane(torch.zeros(1, SMALL.block_bytes, dtype=torch.uint8), "the reader", HOST)
        return self._owner, self._plane

    async def __aexit__(self, *_: object) -> None:
        await self._plane.close()
        await self._owner.close()
