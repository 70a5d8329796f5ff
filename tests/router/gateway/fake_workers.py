"""Workers of real gRPC whose engine is a script. A worker answers each call as the next of its acts says; without one it serves well.

The answer to any prompt is `ANSWER`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from grpc import aio

from cluster import rpc
from cluster.convert import finish_reason_to_pb, output_to_pb, request_from_pb
from cluster.errors import BatonError, Draining, NoCapacity, StaleEpoch, TicketStale, WrongIncarnation
from cluster.kv_layout import KVLayout
from cluster.pb import worker_pb2 as pb
from cluster.pb import worker_pb2_grpc
from cluster.types import FinishReason, Request, TokenOutput, WorkerAddress, WorkerLoad, WorkerRole, WorkerState

SECRET: Final = "secret of the tests"
MAX_MODEL_LEN: Final = 256
ANSWER: Final = tuple(range(40, 72))
EOS: Final = 2
NUM_CACHED_TOKENS: Final = 3
OFFERED: Final = b"offer of "  # how a ticket begins that is not complete


class Act(Enum):
    """What a worker does with one call."""

    SERVE = auto()
    REFUSE = auto()  # draining
    WRONG_LIFE = auto()
    STALE_EPOCH = auto()
    FAIL = auto()  # at once, with NO_CAPACITY
    BUG = auto()  # at once, with INTERNAL
    STALL = auto()  # says nothing
    OFFER_FAIL = auto()
    OFFER_STALL = auto()
    FIRST_FAIL = auto()  # prefill: after the first token the lease is lost
    DECLINE = auto()
    TICKET_STALE = auto()
    TAKEN_STALL = auto()
    TAKEN_FAIL = auto()
    SOME_FAIL = auto()  # after two more tokens
    SOME_STALL = auto()
    SOME_END = auto()  # ends the stream without a finish reason
    ABORT = auto()  # finish reason abort


_NOWHERE: Final = WorkerAddress("", "", "")


@dataclass
class FakeLease:
    """A prompt's KV, from the offer on."""

    is_computed: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class FakeWorker:
    """One life of a worker."""

    role: WorkerRole
    leases: dict[str, FakeLease]  # of the whole cluster, by key
    acts: deque[Act] = field(default_factory=deque)
    answer: tuple[int, ...] = ANSWER
    batch: int = 2  # tokens in one event
    requests: list[Request] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    is_up: bool = True
    address: WorkerAddress = _NOWHERE
    server: aio.Server | None = None

    async def start(self, name: str) -> None:
        self.server = rpc.server(SECRET)
        worker_pb2_grpc.add_PrefillServicer_to_server(_Prefill(self), self.server)
        worker_pb2_grpc.add_DecodeServicer_to_server(_Decode(self), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.address = WorkerAddress(name, f"{name}-life", f"127.0.0.1:{port}")

    async def stop(self) -> None:
        """As a kill: no call ends well, and no report comes any more."""
        self.is_up = False
        if self.server is not None:
            await self.server.stop(None)

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            worker_id=self.address.worker_id, incarnation=self.address.incarnation, role=self.role, state=WorkerState.RUNNING,
            endpoint=self.address.endpoint, node_id="node", checkpoint="checkpoint", domain="domain", max_model_len=MAX_MODEL_LEN,
            layout=KVLayout(2, 2, 16, 16, "bf16"), num_blocks=1000, num_reserved_blocks=10, max_num_seqs=64,
            max_num_batched_tokens=4096, num_blocks_free=1000, live_requests=tuple(self.live),
        )  # fmt: skip

    async def enter(self, header: pb.Header, message: pb.Request) -> Act:
        """Begins a call: its act, unless that is to fail at once."""
        self.requests.append(request_from_pb(message))
        if header.incarnation != self.address.incarnation:
            raise WrongIncarnation("another life")
        act = self.acts.popleft() if self.acts else Act.SERVE
        if act in _FAIL_AT_ONCE:
            raise _FAIL_AT_ONCE[act]
        if act is Act.BUG:
            raise BatonError("a bug")
        if act is Act.STALL:
            await self.stall()
        return act

    async def stall(self) -> None:
        self.stalled.set()
        await asyncio.Event().wait()


_FAIL_AT_ONCE: Final[dict[Act, BatonError]] = {
    Act.REFUSE: Draining("draining"),
    Act.WRONG_LIFE: WrongIncarnation("another life"),
    Act.STALE_EPOCH: StaleEpoch("an older router"),
    Act.FAIL: NoCapacity("no"),
    Act.TICKET_STALE: TicketStale("the lease is over"),
}


@asynccontextmanager
async def _call(worker: FakeWorker, request: pb.Request, context: Any) -> AsyncIterator[None]:
    key = f"{request.request_id}/{request.attempt}"
    worker.live.add(key)
    try:
        async with rpc.answering(context):
            yield
    finally:
        worker.live.discard(key)


def _output(request: pb.Request, token_id: int) -> pb.TokenOutput:
    wanted = request.sampling.num_logprobs if request.sampling.HasField("num_logprobs") else None
    if wanted is None:
        return pb.TokenOutput(token_id=token_id)
    top = tuple((token_id + rank, -0.5 - rank) for rank in range(wanted))
    return output_to_pb(TokenOutput(token_id, -0.5 if token_id % 2 else float("-inf"), top))


def _tokens(worker: FakeWorker, request: pb.Request) -> tuple[list[pb.TokenOutput], FinishReason]:
    ids = worker.answer[: request.sampling.max_tokens]
    reason = FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH
    return [_output(request, token_id) for token_id in ids], reason


class _Prefill(worker_pb2_grpc.PrefillServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[pb.PrefillEvent]:  # noqa: N802
        async with _call(self._worker, request.request, context):
            act = await self._worker.enter(request.header, request.request)
            outputs, reason = _tokens(self._worker, request.request)
            key = f"{request.request.request_id}/{request.request.attempt}"
            is_whole = len(outputs) == 1
            lease = self._worker.leases.setdefault(key, FakeLease())
            try:
                yield pb.PrefillEvent(offer=pb.KVOffer(ticket=OFFERED + key.encode(), num_cached_tokens=NUM_CACHED_TOKENS, wait_s=0.001))
                if act is Act.OFFER_FAIL:
                    raise NoCapacity("no")
                if act is Act.OFFER_STALL:
                    await self._worker.stall()
                yield pb.PrefillEvent(ready=pb.Ready(upto_token=1))
                yield pb.PrefillEvent(
                    first_token=pb.FirstToken(
                        output=outputs[0], finish_reason=finish_reason_to_pb(reason if is_whole else None),
                        ticket=b"" if is_whole else key.encode(), prefill_s=0.002,
                    )
                )  # fmt: skip
                if act is Act.FIRST_FAIL:
                    raise TicketStale("the lease ran out")
                if not is_whole:
                    lease.is_computed.set()
                    await lease.taken.wait()
            finally:
                del self._worker.leases[key]


class _Decode(worker_pb2_grpc.DecodeServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> AsyncIterator[pb.DecodeEvent]:  # noqa: N802
        async with _call(self._worker, request.request, context):
            act = await self._worker.enter(request.header, request.request)
            if act is Act.DECLINE:
                yield pb.DecodeEvent(declined=pb.Declined(reason="full", retry_after_s=0.01))
                return
            if request.ticket:
                await self._take(request.ticket)
                yield pb.DecodeEvent(taken=pb.KVTaken(plane="fake", num_bytes=1, wait_s=0.001, transfer_s=0.003))
            else:
                yield pb.DecodeEvent(prefilled=pb.Prefilled(num_cached_tokens=NUM_CACHED_TOKENS, wait_s=0.001, prefill_s=0.002))
            async for event in self._rest(act, request):
                yield event

    async def _take(self, ticket: bytes) -> None:
        key = ticket.removeprefix(OFFERED).decode()
        lease = self._worker.leases.get(key)
        while ticket.startswith(OFFERED) and lease is not None and not lease.is_computed.is_set():
            await asyncio.sleep(0.001)
            lease = self._worker.leases.get(key)
        if lease is None:
            raise TicketStale("nothing is leased")
        lease.taken.set()

    async def _rest(self, act: Act, request: pb.DecodeRequest) -> AsyncIterator[pb.DecodeEvent]:
        if act is Act.TAKEN_STALL:
            await self._worker.stall()
        if act is Act.TAKEN_FAIL:
            raise NoCapacity("no")
        outputs, reason = _tokens(self._worker, request.request)
        num_out = max(len(request.request.generated_token_ids), 1 if request.ticket else 0)
        assert [output.token_id for output in outputs[: len(request.request.generated_token_ids)]] == request.request.generated_token_ids
        rest = outputs[num_out:]
        batches = [rest[start : start + self._worker.batch] for start in range(0, len(rest), self._worker.batch)]
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            finish = FinishReason.ABORT if act is Act.ABORT else reason
            yield pb.DecodeEvent(
                tokens=pb.Tokens(
                    outputs=batch, finish_reason=finish_reason_to_pb(finish if is_last else None),
                    decode_wait_s=0.0 if index else 0.001, step_s=0.0 if index else 0.002,
                )
            )  # fmt: skip
            if act is Act.SOME_FAIL:
                raise NoCapacity("no")
            if act is Act.SOME_STALL:
                await self._worker.stall()
            if act is Act.SOME_END:
                return
