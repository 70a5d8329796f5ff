"""The reader's end of a `KV.Nccl` call: asks for groups, and hears in the order of asking which of them the owner sends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from grpc import aio

from cluster import rpc
from cluster.errors import BatonError, TransferError, from_code
from cluster.kv_transfer.control import transfer_errors
from cluster.kv_transfer.patience import Patience
from cluster.pb import worker_pb2 as pb
from cluster.pb import worker_pb2_grpc as stubs

_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), *rpc.KEEPALIVE)  # a connection of its own: its end is the communicator's

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Ask(Generic[_T]):
    on_go: Callable[[pb.NcclGo], _T]
    answer: asyncio.Future[_T | BatonError]


class NcclStream:
    """One call, from its making to `close`. Use it on one event loop."""

    def __init__(self, endpoint: str, secret: str, on_end: Callable[[BatonError], object]) -> None:
        """`on_end` hears why the call has ended, once, whoever ended it."""
        self._channel = rpc.channel(endpoint, *_OPTIONS)
        # Requests are written one by one; the stubs know iterators only.
        self._call: Any = stubs.KVStub(self._channel).Nccl(metadata=rpc.secret_metadata(secret))  # type: ignore[call-arg]
        self._on_end = on_end
        self._asks: deque[_Ask[Any]] = deque()  # asked and not answered, in order
        self._writing = asyncio.Lock()
        self._reading = asyncio.create_task(self._read_answers())

    async def ask(self, request: pb.NcclRequest, on_go: Callable[[pb.NcclGo], _T], patience: Patience) -> _T | BatonError:
        """Sends `request`. Where the owner goes ahead, `on_go` is called at once, before later answers are looked at and whether or not
        somebody still waits; its result is returned. A refusal of this request is returned as the error it is.

        Raises:
            BatonError: the call has ended, or the owner does not answer.
        """
        ask = _Ask(on_go, asyncio.get_running_loop().create_future())
        writing = asyncio.ensure_future(self._write(request, ask))
        await patience.wait(writing, "asking the peer")
        return await patience.wait(ask.answer, "the peer's answer")

    async def close(self) -> None:
        """Ends the call; who waits for an answer gets an error. Idempotent."""
        self._call.cancel()
        await asyncio.wait([self._reading])
        await self._channel.close(None)

    async def _write(self, request: pb.NcclRequest, ask: _Ask[Any]) -> None:
        async with self._writing:
            if self._reading.done():
                raise TransferError("the connection to the peer is closed")
            self._asks.append(ask)
            try:
                with transfer_errors():
                    await self._call.write(request)
            except asyncio.InvalidStateError as error:  # the call has ended: the reading task says why
                raise TransferError("the peer has ended the connection") from error

    async def _read_answers(self) -> None:
        error: BatonError = TransferError("the peer has ended the connection")
        try:
            with transfer_errors():
                while (reply := await self._call.read()) is not aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                    self._hear(reply)
        except BatonError as failure:
            error = failure
        for ask in self._asks:
            if not ask.answer.done():
                ask.answer.set_exception(error)
                ask.answer.exception()  # seen, whether or not anybody waits for it
        self._asks.clear()
        self._on_end(error)

    def _hear(self, reply: pb.NcclReply) -> None:
        if not self._asks:
            raise TransferError("the peer answers what was not asked")
        ask = self._asks.popleft()
        if reply.WhichOneof("reply") == "go":
            ask.answer.set_result(ask.on_go(reply.go))
        else:
            refusal = reply.refusal
            param = refusal.param if refusal.HasField("param") else None
            ask.answer.set_result(from_code(refusal.code, refusal.message, param=param))
