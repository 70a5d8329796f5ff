"""The owner's side of KV control: a prefill worker's `KV` service over its pool, its planes and its outbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import torch
from grpc import aio

from cluster import rpc, wire
from cluster.errors import PlaneUnavailable
from cluster.faults.injector import NO_FAULTS, FaultInjector
from cluster.faults.points import FaultPoint
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import TicketChecker, source_rows
from cluster.kv_transfer.chunks import pack_chunks
from cluster.kv_transfer.control import PROTOCOL_VERSION, check_version
from cluster.kv_transfer.nccl import NcclPlane
from cluster.pb import worker_pb2 as pb
from cluster.pb import worker_pb2_grpc as stubs

_Context = aio.ServicerContext[Any, Any]


class KVService(stubs.KVServicer):
    """Answers on the event loop of the `TicketChecker`, so that a check and the copy after it are one."""

    def __init__(
        self,
        *,
        incarnation: str,
        layout: KVLayout,
        checkpoint: str,
        domain: str,
        pool: torch.Tensor,
        planes: dict[str, bytes],
        checker: TicketChecker,
        nccl: NcclPlane | None = None,
        faults: FaultInjector = NO_FAULTS,
    ) -> None:
        """
        Args:
            incarnation: of this worker.
            layout: of the blocks in `pool`.
            checkpoint: fingerprint of the model.
            domain: numerics domain of the KV.
            pool: uint8 `[num_blocks, block_bytes]`.
            planes: what `selection.publish` returned.
            checker: knows the leases.
            nccl: the plane that serves `Nccl` calls, where `planes` has it.
            faults: at `follow`, `lease.renew` and `release`.
        """
        assert pool.shape[1] == layout.block_bytes, "the pool does not have the layout's blocks"
        self._incarnation = incarnation
        self._pool = pool
        self._checker = checker
        self._nccl = nccl
        self._faults = faults
        self._description = pb.DescribeReply(
            protocol_version=PROTOCOL_VERSION,
            incarnation=incarnation,
            layout=wire.encode(layout),
            checkpoint=checkpoint,
            domain=domain,
            planes=planes,
        )

    def register(self, server: aio.Server) -> None:
        """Adds the service to a worker's server."""
        stubs.add_KVServicer_to_server(self, server)

    async def Describe(self, request: pb.DescribeRequest, context: _Context) -> pb.DescribeReply:  # noqa: N802
        async with rpc.answering(context):
            check_version(request.protocol_version)
        return self._description

    async def Follow(self, request: pb.FollowRequest, context: _Context) -> AsyncIterator[pb.Progress]:  # noqa: N802
        async with rpc.answering(context):
            rpc.check_incarnation(request.header.incarnation, self._incarnation)
            async with aclosing(self._checker.follow(_key(request.ticket), request.ticket.nonce)) as marks:
                async for mark in marks:
                    ticket = b"" if mark.ticket is None else await self._faults.carry(FaultPoint.FOLLOW, wire.encode(mark.ticket))
                    yield pb.Progress(num_ready_tokens=mark.num_ready_tokens, ticket=ticket)

    async def Fetch(self, request: pb.FetchRequest, context: _Context) -> AsyncIterator[pb.FetchChunk]:  # noqa: N802
        async with rpc.answering(context):
            rpc.check_incarnation(request.header.incarnation, self._incarnation)
            ticket = KVTicket.unpack(request.ticket)
            num_blocks = max(request.indexes, default=-1) + 1
            self._checker.check(ticket, num_blocks)
            rows = source_rows(ticket, request.indexes, self._pool.shape[0])
            for index, data in pack_chunks(self._pool, rows):
                self._checker.check(ticket, num_blocks)  # still, and so until after the copy that was just made
                yield pb.FetchChunk(index=index, data=data)

    async def Nccl(  # type: ignore[override]  # noqa: N802  # as of Prefill: the stubs know generators only
        self, requests: AsyncIterator[pb.NcclRequest], context: _Context
    ) -> None:
        async with rpc.answering(context):
            if self._nccl is None:
                raise PlaneUnavailable("this worker's pool cannot be read by NCCL")
            await self._nccl.serve(context, self._checker)

    async def Renew(self, request: pb.RenewRequest, context: _Context) -> pb.RenewReply:  # noqa: N802
        async with rpc.answering(context):
            rpc.check_incarnation(request.header.incarnation, self._incarnation)
            await self._faults.reach(FaultPoint.LEASE_RENEW)
        lease_s = self._checker.renew(_key(request.ticket), request.ticket.nonce)
        return pb.RenewReply(state=_state(lease_s is not None), lease_s=lease_s or 0.0)

    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseReply:  # noqa: N802
        async with rpc.answering(context):
            rpc.check_incarnation(request.header.incarnation, self._incarnation)
            valid = self._checker.release(_key(request.ticket), request.ticket.nonce, request.digest, request.taker)
            await self._faults.reach(FaultPoint.RELEASE)
        return pb.ReleaseReply(state=_state(valid))


def _key(name: pb.TicketName) -> str:
    return f"{name.request_id}/{name.attempt}"


def _state(valid: bool) -> pb.LeaseState.ValueType:
    return pb.LEASE_STATE_VALID if valid else pb.LEASE_STATE_STALE
