"""Tickets that are not what they should be, sent to two real workers: each is refused by name, none gives a token (promise P3).

What a decode worker refuses before it has asked the prefill worker, and what only the prefill worker can tell, is refused all the same; and
a try with a wrong ticket takes nothing from whoever holds the right one.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from grpc import aio
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster import rpc, wire
from cluster.config import TransferConfig
from cluster.errors import BatonError, TicketMismatch, TicketStale, WorkerRefusal, WrongIncarnation
from cluster.kv_ticket import KVTicket
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import KVStub
from cluster.types import Request
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.harness import Workers, check_books, make_request, random_prompt
from tests.kv_transfer.planes import ONE_SIDED, PLANES
from tests.tiny_models import tiny_model
from tests.worker_client import SECRET, FirstToken

PROMPT = random_prompt(40)  # five blocks
BRIEF = TransferConfig(lease_s=0.2, renew_interval_s=0.1)
LONG = TransferConfig(lease_s=3600, max_lease_s=3600)


@dataclass
class Handoff:
    """A prompt that was computed and waits to be taken, and another one beside it."""

    workers: Workers
    prefill: PrefillWorker
    decode: DecodeWorker
    request: Request
    first: FirstToken
    other: FirstToken

    @property
    def ticket(self) -> KVTicket:
        return self.first.decoded_ticket

    def changed(self, **fields: Any) -> bytes:
        return wire.encode(dataclasses.replace(self.ticket, **fields))

    async def refusal(self, ticket: bytes) -> BatonError:
        """With what the decode worker refuses `ticket`; not one message may come before."""
        events, error = await outcome(self.workers.client.decode(self.decode, self.request, ticket))
        assert not events and error is not None, events
        return error

    async def take(self) -> None:
        """As it should be done."""
        events, error = await outcome(self.workers.client.decode(self.decode, self.request, self.first.ticket))
        assert error is None and events[0].WhichOneof("event") == "taken"

    async def end(self) -> None:
        for first in (self.first, self.other):
            first.call.cancel()
        await check_books(self.prefill, self.decode)


@asynccontextmanager
async def handoff(plane: str, transfer: TransferConfig | None = None) -> AsyncIterator[Handoff]:
    async with Workers(tiny_model("llama"), plane, transfer=transfer or TransferConfig()) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        yield await offered(workers, prefill, decode)


async def offered(workers: Workers, prefill: PrefillWorker, decode: DecodeWorker) -> Handoff:
    request = make_request(PROMPT)
    first = await workers.client.first_token(workers.client.prefill(prefill, request))
    other = await workers.client.first_token(workers.client.prefill(prefill, make_request(random_prompt(40, seed=1))))
    return Handoff(workers, prefill, decode, request, first, other)


async def outcome(call: Any) -> tuple[list[Any], BatonError | None]:
    events: list[Any] = []
    try:
        async for event in call:
            events.append(event)
    except aio.AioRpcError as failure:
        return events, rpc.error_of(failure)
    return events, None


def unlike(handoff: Handoff, field: str) -> bytes:
    """The right ticket but for one field, of the right type and of a likely value."""
    ticket, other = handoff.ticket, handoff.other.decoded_ticket
    layout = ticket.layout
    values: dict[str, Any] = {
        "num_layers": {"layout": dataclasses.replace(layout, num_layers=layout.num_layers + 1)},
        "block_size": {"layout": dataclasses.replace(layout, block_size=2 * layout.block_size), "blocks": ticket.blocks[:3]},
        "blocks": {"blocks": other.blocks},
        "offered blocks": {"blocks": other.blocks, "first_token": None},
        "offered by another": {"nonce": other.nonce, "blocks": other.blocks, "first_token": None},
        "generation": {"blocks": tuple(dataclasses.replace(ref, generation=ref.generation + 1) for ref in ticket.blocks)},
        "first_token": {"first_token": dataclasses.replace(ticket.first_token, token_id=ticket.first_token.token_id ^ 1)},  # type: ignore[type-var, union-attr]
    }
    return handoff.changed(**values[field])


Make = Callable[[Handoff], bytes]
# Kind → how such a ticket comes about, and the error and field it is refused with. A wrong ticket that fits the request and the decode
# worker is for the prefill worker to refuse: while it is read, where the plane asks it (grpc, nccl), and else at the commit, as a whole.
WRONG: dict[str, tuple[Make, type[BatonError], str | None]] = {
    "corrupted: no msgpack": (lambda it: b"\xc1" + it.first.ticket[1:], TicketMismatch, "ticket"),
    "corrupted: a field's name": (lambda it: it.first.ticket.replace(b"request_id", b"request_ix"), TicketMismatch, "ticket"),
    "corrupted: its nonce": (lambda it: it.changed(nonce=bytes([it.ticket.nonce[0] ^ 1]) + it.ticket.nonce[1:]), TicketStale, None),
    "corrupted: a generation": (lambda it: unlike(it, "generation"), TicketMismatch, "blocks"),
    "corrupted: its first token": (lambda it: unlike(it, "first_token"), TicketMismatch, "first_token"),
    "truncated by a byte": (lambda it: it.first.ticket[:-1], TicketMismatch, "ticket"),
    "truncated in the middle": (lambda it: it.first.ticket[: len(it.first.ticket) // 2], TicketMismatch, "ticket"),
    "truncated to nothing": (lambda _: b"", WorkerRefusal, "ticket"),
    "corrupted: an optional field's name": (lambda it: it.first.ticket.replace(b"first_token", b"first_tokem"), TicketMismatch, "ticket"),
    "an offer of other blocks": (lambda it: unlike(it, "offered blocks"), TicketMismatch, "blocks"),
    "an offer of another request under our name": (lambda it: unlike(it, "offered by another"), TicketStale, None),
    "of another incarnation": (lambda it: it.changed(incarnation="another life"), TicketStale, None),
    "of another layout": (lambda it: unlike(it, "num_layers"), TicketMismatch, "layout"),
    "of blocks that could be repacked": (lambda it: unlike(it, "block_size"), TicketMismatch, "layout"),
    "of another model": (lambda it: it.changed(checkpoint="another model"), TicketMismatch, "checkpoint"),
    "of another domain": (lambda it: it.changed(domain="another domain"), TicketMismatch, "domain"),
    "of another request": (lambda it: it.other.ticket, TicketMismatch, "request_id"),
    "of another attempt": (lambda it: it.changed(attempt=1), TicketMismatch, "attempt"),
    "of another request under our name": (
        lambda it: wire.encode(dataclasses.replace(it.other.decoded_ticket, request_id=it.ticket.request_id)),
        TicketStale,
        None,
    ),
    "with another request's blocks": (lambda it: unlike(it, "blocks"), TicketMismatch, "blocks"),
}
AT_THE_COMMIT = ("corrupted: a generation", "corrupted: its first token", "with another request's blocks")  # if the plane is one-sided


@pytest.mark.parametrize("plane", PLANES)
async def test_a_wrong_ticket_is_refused_by_name_and_gives_no_token(plane: str) -> None:
    async with handoff(plane) as it:
        for kind, (make, expected, param) in WRONG.items():
            error = await it.refusal(make(it))
            told_at_the_commit = plane in ONE_SIDED and kind in AT_THE_COMMIT
            assert (type(error), error.param) == (expected, "ticket" if told_at_the_commit else param), f"{kind}: {error!r}"
            await check_books(it.decode)
        await it.take()
        await it.end()


@pytest.mark.parametrize("plane", PLANES)
async def test_a_ticket_that_was_taken_gives_no_token_to_anybody(plane: str) -> None:
    async with handoff(plane) as it:
        await it.take()
        for decode in (it.decode, await it.workers.start_decode()):
            it.decode = decode
            for ticket in (it.first.ticket, it.first.offer):
                assert isinstance(await it.refusal(ticket), TicketStale)
        await it.end()


@pytest.mark.parametrize("plane", PLANES)
async def test_a_ticket_that_has_expired_gives_no_token(plane: str) -> None:
    async with handoff(plane, BRIEF) as it:
        assert isinstance((await outcome(it.first.call))[1], TicketStale)  # the prefill stream ends with its lease
        for ticket in (it.first.ticket, it.first.offer):
            assert isinstance(await it.refusal(ticket), TicketStale)
        await it.end()


async def test_calls_for_another_life_are_refused_before_any_work() -> None:
    async with handoff("grpc") as it:
        client = it.workers.client
        wrong = {"incarnation": "another life"}
        for call in (client.decode(it.decode, it.request, it.first.ticket, **wrong), client.prefill(it.prefill, it.request, **wrong)):
            events, error = await outcome(call)
            assert not events and isinstance(error, WrongIncarnation) and error.param == "incarnation"
        await it.take()
        await it.end()


class _KV:
    """The prefill worker's KV service, asked by a reader who need not be a decode worker of ours."""

    def __init__(self, it: Handoff) -> None:
        self._channel = rpc.channel(it.prefill.endpoint.address)
        self._stub = KVStub(self._channel)
        self._metadata = rpc.secret_metadata(SECRET)
        self._header = pb.Header(incarnation=it.prefill.gate.incarnation)

    async def fetch(self, ticket: bytes, header: pb.Header | None = None) -> BatonError | None:
        """How a read of the first block is refused; None when it came."""
        request = pb.FetchRequest(header=header or self._header, ticket=ticket, indexes=[0])
        events, error = await outcome(self._stub.Fetch(request, metadata=self._metadata))
        assert bool(events) is (error is None)
        return error

    async def release(self, ticket: KVTicket, digest: bytes, header: pb.Header | None = None) -> BatonError | bool:
        """How a commit is answered."""
        return await self._ask(
            self._stub.Release, pb.ReleaseRequest(header=header or self._header, ticket=_name(ticket), digest=digest, taker="x")
        )

    async def renew(self, ticket: KVTicket, header: pb.Header | None = None) -> BatonError | bool:
        return await self._ask(self._stub.Renew, pb.RenewRequest(header=header or self._header, ticket=_name(ticket)))

    async def close(self) -> None:
        await self._channel.close(None)

    async def _ask(self, method: Callable[..., Awaitable[Any]], request: Any) -> BatonError | bool:
        try:
            reply = await method(request, metadata=self._metadata)
        except aio.AioRpcError as failure:
            return rpc.error_of(failure)
        return bool(reply.state == pb.LEASE_STATE_VALID)


def _name(ticket: KVTicket) -> pb.TicketName:
    return pb.TicketName(request_id=ticket.request_id, attempt=ticket.attempt, nonce=ticket.nonce)


# What the prefill worker says of itself that the decode worker puts otherwise.
BY_PREFILL: dict[str, tuple[type[BatonError], str | None]] = {
    "truncated to nothing": (TicketMismatch, "ticket"),
    "of another incarnation": (TicketMismatch, "incarnation"),
    "of blocks that could be repacked": (TicketMismatch, "blocks"),
    "of another attempt": (TicketStale, None),
}


async def test_the_prefill_worker_gives_no_block_and_no_commit_for_a_wrong_ticket() -> None:
    async with handoff("grpc") as it:
        kv = _KV(it)
        for kind, (make, expected, param) in WRONG.items():
            data = make(it)
            if kind == "of another request":  # to the prefill worker as good as ours
                continue
            expected, param = BY_PREFILL.get(kind, (expected, param))
            error = await kv.fetch(data)
            assert (type(error), error.param if error else None) == (expected, param), f"{kind}: {error!r}"
            try:
                ticket = KVTicket.unpack(data)
            except TicketMismatch:
                continue
            answer = await kv.release(ticket, ticket.digest())
            assert answer is False or isinstance(answer, TicketMismatch), f"{kind}: {answer!r}"
        other_life = pb.Header(incarnation="another life")
        for found in (
            await kv.fetch(it.first.ticket, other_life),
            await kv.release(it.ticket, it.ticket.digest(), other_life),
            await kv.renew(it.ticket, other_life),
        ):
            assert isinstance(found, WrongIncarnation) and found.param == "incarnation"
        assert await kv.fetch(it.first.ticket) is None and await kv.renew(it.ticket) is True, "the right ticket is as good as before"
        await it.take()
        assert isinstance(await kv.fetch(it.first.ticket), TicketStale)
        assert await kv.renew(it.ticket) is False and await kv.release(it.ticket, it.ticket.digest()) is False
        await kv.close()
        await it.end()


def test_any_damage_to_a_ticket_is_a_refusal() -> None:
    """Whatever bytes are flipped: an error with a name, no message, and nothing is held. The right ticket works afterwards."""
    with asyncio.Runner() as runner:
        context = handoff("shared_memory", LONG)
        it = runner.run(context.__aenter__())
        data = it.first.ticket

        @settings(max_examples=150, deadline=None)
        @given(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(1, 255)), min_size=1, max_size=4))
        def damage(flips: list[tuple[int, int]]) -> None:
            damaged = bytearray(data)
            for position, bits in flips:
                damaged[position] ^= bits
            assume(damaged != data)
            with suppress(BatonError):
                ticket = KVTicket.unpack(bytes(damaged))
                assume(ticket.incarnation == it.ticket.incarnation or ticket.endpoint == it.ticket.endpoint)  # else it names any host
            error = runner.run(it.refusal(bytes(damaged)))
            assert isinstance(error, TicketMismatch | TicketStale), repr(error)

        unknown = wire.encode(dataclasses.replace(it.ticket, nonce=bytes(16)))
        assert isinstance(runner.run(it.refusal(unknown)), TicketStale)  # and now it knows this life, whatever endpoint a ticket names
        damage()
        runner.run(check_books(it.decode))
        runner.run(it.take())
        runner.run(it.end())
        runner.run(context.__aexit__(None, None, None))
