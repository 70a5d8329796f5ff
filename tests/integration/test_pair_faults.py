"""Faults at every point of a handoff between two real workers: the right text or a typed error, and the books balance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import product
from typing import Any, Final

import pytest
from grpc import aio

from cluster import rpc
from cluster.config import TransferConfig
from cluster.errors import BatonError, NoCapacity, TicketStale, TransferError
from cluster.faults.points import FaultAction, FaultPoint
from cluster.faults.rules import FaultInjectionConfig
from cluster.types import Request
from tests.harness import Workers, check_books, make_request, random_prompt
from tests.kv_transfer.planes import PLANES
from tests.tiny_models import tiny_model

PROMPT: Final = random_prompt(40)
DELAY_S: Final = 0.05
CHECKED: Final = TransferConfig(checksums=True)
RENEWED: Final = TransferConfig(checksums=True, renew_interval_s=0.05)
SHORT: Final = TransferConfig(checksums=True, renew_interval_s=0.05, lease_s=0.4)
SLOW_FETCH: Final = {"point": "fetch.start", "action": "delay", "delay_s": 0.6}  # longer than the short lease, if nobody renews it

CASES: Final = [
    (point, action)
    for point, action in product(FaultPoint, FaultAction)
    if action in point.actions and action is not FaultAction.KILL and point is not FaultPoint.LEASE_RENEW
]

HARMLESS: Final = {
    (FaultPoint.COMMIT, FaultAction.DROP),  # asked for once more
    (FaultPoint.RELEASE, FaultAction.DROP),  # likewise, and the same taker gets the same answer
    *((point, FaultAction.DELAY) for point in FaultPoint),
}


def once(point: FaultPoint, action: FaultAction, **fields: Any) -> dict[str, Any]:
    """The first passage, in each worker."""
    delay = {"delay_s": DELAY_S} if action is FaultAction.DELAY else {}
    return {"point": point, "action": action, "max_count": 1, **delay, **fields}


def workers_with(*rules: dict[str, Any], plane: str = "shared_memory", transfer: TransferConfig = CHECKED, seed: int = 0) -> Workers:
    faults = FaultInjectionConfig.model_validate({"seed": seed, "rules": rules})
    return Workers(tiny_model("llama"), plane, transfer=transfer, faults=faults)


async def expected_tokens() -> list[int]:
    async with Workers(tiny_model("llama")) as workers:
        answer = await workers.client.colocated(await workers.start_colocated(), make_request(PROMPT))
    return answer.token_ids


async def outcome(workers: Workers, prefill: Any, decode: Any, request: Request) -> list[int] | BatonError:
    """The whole text, or the error that ended one of the legs; the other is closed then, as a gateway does."""
    call = workers.client.prefill(prefill, request)
    try:
        first = await workers.client.first_token(call)
        tokens = [first.event.output.token_id, *await decoded(workers, decode, request, first.ticket)]
        assert await anext(first.rest, None) is None, "the lease is consumed"
    except aio.AioRpcError as failure:
        return rpc.error_of(failure)
    finally:
        call.cancel()
    return tokens


async def outcome_of_offer(workers: Workers, prefill: Any, decode: Any, request: Request) -> list[int] | BatonError:
    """As `outcome`, where decode is asked with the offer."""
    call, decoding = workers.client.prefill(prefill, request), None
    try:
        events = aiter(call)
        offer = await anext(events)
        decoding = asyncio.create_task(decoded(workers, decode, request, offer.offer.ticket))
        prefilled = asyncio.create_task(last_event(events))
        await asyncio.wait((decoding, prefilled), return_when=asyncio.FIRST_EXCEPTION)
        for leg in (decoding, prefilled):
            if leg.done():
                leg.result()
        return [(await prefilled).first_token.output.token_id, *await decoding]
    except aio.AioRpcError as failure:
        return rpc.error_of(failure)
    finally:
        call.cancel()
        if decoding is not None:
            decoding.cancel()


async def decoded(workers: Workers, decode: Any, request: Request, ticket: bytes) -> list[int]:
    return [output.token_id async for event in workers.client.decode(decode, request, ticket) for output in event.tokens.outputs]


async def last_event(events: AsyncIterator[Any]) -> Any:
    return [event async for event in events][-1]


Ask = Callable[[Workers, Any, Any, Request], Awaitable[list[int] | BatonError]]
UNUSED: Final[dict[Ask, FaultPoint]] = {outcome: FaultPoint.OFFER, outcome_of_offer: FaultPoint.FIRST_TOKEN}  # of two tickets


@pytest.mark.parametrize(("point", "action"), CASES)
@pytest.mark.parametrize("ask", [outcome, outcome_of_offer], ids=["ticket", "offer"])
async def test_a_fault_at_each_point(ask: Ask, point: FaultPoint, action: FaultAction) -> None:
    expected = await expected_tokens()
    async with workers_with(once(point, action)) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        found = await ask(workers, prefill, decode, make_request(PROMPT))
        if (point, action) in HARMLESS or (action is FaultAction.CORRUPT and point is UNUSED[ask]):
            assert found == expected
        elif ask is outcome and point is FaultPoint.FOLLOW:
            assert found == expected, "nobody follows"
        else:
            assert isinstance(found, NoCapacity), f"{found}: of the errors that are tried again"
        assert workers.num_injected(point, action) == (0 if ask is outcome and point is FaultPoint.FOLLOW else 1)
        await check_books(prefill, decode)
        assert await ask(workers, prefill, decode, make_request(PROMPT)) == expected, "the next one is well"
        await check_books(prefill, decode)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("action", [FaultAction.DROP, FaultAction.CORRUPT])
async def test_blocks_that_arrive_damaged_or_not_at_all(plane: str, action: FaultAction) -> None:
    """Over every plane; what a failed read has written is never shown."""
    expected = await expected_tokens()
    async with workers_with(once(FaultPoint.FETCH_CHUNK, action), plane=plane) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        found = await outcome(workers, prefill, decode, make_request(PROMPT))
        assert isinstance(found, TransferError)
        assert found.param == ("checksums" if action is FaultAction.CORRUPT else None)
        await check_books(prefill, decode)
        assert await outcome(workers, prefill, decode, make_request(PROMPT)) == expected


@pytest.mark.parametrize(
    ("ask", "point"), [(outcome, FaultPoint.FIRST_TOKEN), (outcome_of_offer, FaultPoint.OFFER), (outcome_of_offer, FaultPoint.FOLLOW)]
)
async def test_a_damaged_ticket_gives_no_token(ask: Ask, point: FaultPoint) -> None:
    """Whichever byte it is: the ticket is refused, or what was changed is no part of it."""
    expected = await expected_tokens()
    async with workers_with({"point": point, "action": "corrupt"}) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        for _ in range(25):
            async with asyncio.timeout(20):
                found = await ask(workers, prefill, decode, make_request(PROMPT))
            assert found == expected or isinstance(found, NoCapacity), found
        await check_books(prefill, decode)


async def test_a_renewal_that_is_lost_costs_nothing() -> None:
    expected = await expected_tokens()
    async with workers_with(SLOW_FETCH, once(FaultPoint.LEASE_RENEW, FaultAction.DROP), transfer=RENEWED) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        assert await outcome(workers, prefill, decode, make_request(PROMPT)) == expected
        assert workers.num_injected(FaultPoint.LEASE_RENEW, FaultAction.DROP) == 1
        await check_books(prefill, decode)


@pytest.mark.parametrize("rule", [{"action": "drop"}, {"action": "delay", "delay_s": 1.0}], ids=lambda rule: rule["action"])
async def test_a_lease_that_nobody_renews_in_time_is_stale(rule: dict[str, Any]) -> None:
    async with workers_with(SLOW_FETCH, {"point": "lease.renew", **rule}, transfer=SHORT) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        assert isinstance(await outcome(workers, prefill, decode, make_request(PROMPT)), TicketStale)
        assert workers.num_injected(FaultPoint.LEASE_RENEW, FaultAction(rule["action"])) >= 1
        await check_books(prefill, decode)


async def test_a_commit_that_is_lost_twice_fails_the_handoff() -> None:
    async with workers_with({"point": "commit", "action": "drop", "max_count": 2}) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        found = await outcome(workers, prefill, decode, make_request(PROMPT))
        assert type(found) is TransferError
        await check_books(prefill, decode)


async def test_both_answers_of_the_commit_lost_leave_nothing_behind() -> None:
    """Prefill has given its copy away and decode does not know: the text is lost, the blocks are not."""
    async with workers_with({"point": "release", "action": "drop", "max_count": 2}) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        assert type(await outcome(workers, prefill, decode, make_request(PROMPT))) is TransferError
        await check_books(prefill, decode)
