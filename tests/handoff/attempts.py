"""What a gateway knows of a request's attempts, and what must be true of them whatever happens."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

from cluster import convert
from cluster.errors import InternalError, TransferError
from cluster.kv_ticket import KVTicket
from cluster.types import FinishReason, OrderKey, Request, SamplingParams
from prefill_worker.worker import PrefillWorker
from tests.engine.fakes import BLOCK_SIZE, digests, generate_alone, slot_of
from tests.handoff.lives import MAX_MODEL_LEN, Leg


@dataclass(eq=False)
class Attempt:
    """One attempt of a request: its prefill leg, and the decode legs that were opened with its ticket."""

    request: Request
    prefill: Leg
    decodes: list[Leg] = field(default_factory=list)

    @property
    def offer(self) -> bytes | None:
        """The ticket of the offer, once it is known."""
        return next((event.offer.ticket for event in self.prefill.events if event.WhichOneof("event") == "offer"), None)

    @property
    def ticket(self) -> bytes | None:
        """The complete ticket, once it is known; None for ever when the first token was the last."""
        return next((event.first_token.ticket or None for event in self._first_tokens()), None)

    @property
    def tickets(self) -> list[KVTicket]:
        """The forms of it that are known."""
        return [_unpacked(data) for data in (self.offer, self.ticket) if data is not None]

    def next_attempt(self) -> Request:
        """What a gateway asks for after a failure: the same, with all that was given out."""
        generated = self.request.generated_token_ids
        if not generated:
            generated = tuple(convert.output_from_pb(event.first_token.output).token_id for event in self._first_tokens())
        given_out = max((self._token_ids(leg) for leg in self.decodes), key=len, default=[])
        return replace(self.request, attempt=self.request.attempt + 1, generated_token_ids=(*generated, *given_out))

    @property
    def is_over(self) -> bool:
        """Whether all that was asked for has been given out."""
        outputs = [event.first_token for event in self._first_tokens()]
        return any(output.finish_reason for output in outputs) or any(_last_reason(leg) for leg in self.decodes)

    def check(self) -> None:
        """Whatever was said is true, and every failure has a name of its own."""
        expected, reason = _expected(self.request.prompt_token_ids, self.request.sampling)
        for leg in (self.prefill, *self.decodes):
            assert not isinstance(leg.error, InternalError), f"{self.request.key} at {leg.life.incarnation}: {leg.error!r}"
        for event in self._first_tokens():
            said = convert.output_from_pb(event.first_token.output).token_id
            assert said == expected[0], f"{self.request.key}: the first token is {said}, not {expected[0]}"
        rest = expected[max(1, len(self.request.generated_token_ids)) :]
        for leg in self.decodes:
            found = self._token_ids(leg)
            assert found == rest[: len(found)], f"{self.request.key} at {leg.life.incarnation}: {found} is no beginning of {rest}"
            kinds = [event.WhichOneof("event") for event in leg.events]
            assert kinds in ([], ["declined"]) or kinds == ["taken", *["tokens"] * (len(kinds) - 1)], f"{self.request.key}: {kinds}"
            if not (leg.is_open or leg.error or kinds == ["declined"]):
                assert (found, _last_reason(leg)) == (rest, reason), f"{self.request.key}: its stream ended early"

    def check_readable(self) -> None:
        """What the prefill worker would let a reader have now is the prompt's KV, in the very blocks of the ticket."""
        worker = self.prefill.life.worker
        assert isinstance(worker, PrefillWorker)
        for ticket in self.tickets:
            for num_blocks in range(len(ticket.blocks), 0, -1):
                with suppress(TransferError):
                    worker.outbox.check(ticket, num_blocks)
                    self.check_intact(ticket, num_blocks)
                    break

    def check_intact(self, ticket: KVTicket, num_blocks: int) -> None:
        """The first blocks of the ticket are held for it, and have its prompt's KV."""
        engine = self.prefill.life.engine
        held = engine._blocks.refs(ticket.key) if engine._blocks.holds(ticket.key) else ()
        assert held == ticket.blocks, f"{ticket.key} may be read, and its blocks are {held}"
        for position, digest in enumerate(_kv_of(self.request.prompt_token_ids)[: num_blocks * BLOCK_SIZE]):
            found = slot_of(engine.kv_cache, ticket.blocks[position // BLOCK_SIZE].block_id, position % BLOCK_SIZE)
            assert found.numpy().tobytes() == digest, f"{ticket.key} may be read, and token {position} is another's"

    def _first_tokens(self) -> list[Any]:
        return [event for event in self.prefill.events if event.WhichOneof("event") == "first_token"]

    @staticmethod
    def _token_ids(leg: Leg) -> list[int]:
        tokens = [event.tokens for event in leg.events if event.WhichOneof("event") == "tokens"]
        return [convert.output_from_pb(output).token_id for message in tokens for output in message.outputs]


_unpacked = lru_cache(KVTicket.unpack)


@cache
def _expected(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
    return generate_alone(Request("", 0, prompt, sampling, OrderKey(0.0, 0)), MAX_MODEL_LEN)


@cache
def _kv_of(prompt: tuple[int, ...]) -> list[bytes]:
    return digests(prompt)


def _last_reason(leg: Leg) -> FinishReason | None:
    reasons = [event.tokens.finish_reason for event in leg.events if event.WhichOneof("event") == "tokens"]
    return convert.finish_reason_from_pb(reasons[-1]) if reasons else None
