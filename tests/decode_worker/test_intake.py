from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.errors import (
    BatonError,
    InvalidRequest,
    PlaneUnavailable,
    TicketMismatch,
    TicketStale,
    TransferError,
    Unauthorized,
    WrongIncarnation,
)
from cluster.kv_ticket import BlockRef
from tests.decode_worker.fakes import LAYOUT, Bench, Gate, request, ticket


async def test_reads_then_commits_then_hands_over() -> None:
    bench = Bench()
    taken = await bench.intake.take(request(), ticket())
    assert taken is not None
    assert bench.log == ["reserve", "connect", "read", "read ended", "release"]
    assert (taken.plane, taken.num_bytes) == ("fake", 3 * LAYOUT.block_bytes)
    for block_id, ref in zip((5, 3, 4), ticket().blocks, strict=True):
        assert bench.pool[block_id].equal(bench.peer.pool[ref.block_id])
    assert bench.tails == [(4, 2)], "the last block holds two tokens"
    assert taken.wait_s >= 0 and taken.transfer_s > 0


async def test_a_whole_number_of_blocks_has_no_tail() -> None:
    bench = Bench()
    full = request(prompt_token_ids=tuple(range(12)))
    bench.engine.num_tokens = 12
    assert await bench.intake.take(full, ticket(num_tokens=12)) is not None
    assert bench.tails == []


async def test_only_what_is_not_cached_travels() -> None:
    bench = Bench()
    bench.engine.num_cached_blocks = 2
    taken = await bench.intake.take(request(), ticket())
    assert taken is not None and taken.num_bytes == LAYOUT.block_bytes
    assert bench.peer.indexes == [2]
    assert not bench.pool[5].any() and not bench.pool[3].any(), "cached blocks are shared: not to be written"


async def test_a_prompt_that_is_cached_whole_is_still_committed() -> None:
    bench = Bench()
    bench.engine.num_cached_blocks = 3
    bench.engine.num_tokens = 12
    taken = await bench.intake.take(request(prompt_token_ids=tuple(range(12))), ticket(num_tokens=12))
    assert taken is not None and taken.num_bytes == 0
    assert bench.log == ["reserve", "connect", "release"]


async def test_each_intake_commits_in_a_name_of_its_own() -> None:
    bench = Bench()
    for _ in range(2):
        assert await bench.intake.take(request(), ticket()) is not None
    assert len(bench.peer.takers) == 2


async def test_no_room_is_declined_before_the_peer_is_asked() -> None:
    bench = Bench()
    bench.engine.has_room = False
    assert await bench.intake.take(request(), ticket()) is None
    assert bench.log == ["reserve"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "other"),
        ("attempt", 1),
        ("num_tokens", 9),
        ("layout", replace(LAYOUT, num_layers=3)),
        ("layout", replace(LAYOUT, kv_dtype="int8", packing="vnni")),
        ("checkpoint", "other"),
        ("blocks", (BlockRef(2, 1), BlockRef(0, 3))),
        ("checksums", (1, 2)),
    ],
)
async def test_a_mismatch_names_the_field_and_touches_nothing(field: str, value: Any) -> None:
    bench = Bench()
    with pytest.raises(TicketMismatch) as error:
        await bench.intake.take(request(), ticket(**{field: value}))
    assert error.value.param == field
    assert bench.log == []


async def test_stale_at_the_commit_frees_and_is_not_used() -> None:
    bench = Bench()
    bench.peer.is_valid = False
    with pytest.raises(TicketStale):
        await bench.intake.take(request(), ticket())
    assert bench.log[-2:] == ["release", "abort r/0"]


async def test_good_checksums_pass_and_a_flipped_bit_does_not() -> None:
    bench = Bench()
    checksums = bench.checksums()
    assert await bench.intake.take(request(), ticket(checksums=checksums)) is not None

    bench = Bench()
    bench.peer.pool[ticket().blocks[1].block_id, 17] ^= 1
    with pytest.raises(TransferError) as error:
        await bench.intake.take(request(), ticket(checksums=checksums))
    assert error.value.param == "checksums" and "[1]" in error.value.message
    assert "release" not in bench.log, "damaged blocks are not committed: the prefill worker may be asked again"
    assert bench.log[-1] == "abort r/0"


async def test_checksums_are_of_the_blocks_read_when_some_are_cached() -> None:
    bench = Bench()
    bench.engine.num_cached_blocks = 1
    assert await bench.intake.take(request(), ticket(checksums=bench.checksums())) is not None


@pytest.mark.parametrize("where", ["before_connect", "before_read", "after_read", "before_release"])
@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (TransferError("lost"), TransferError),
        (PlaneUnavailable("none"), PlaneUnavailable),
        (WrongIncarnation("restarted"), TicketStale),
        (Unauthorized("secret"), TransferError),
    ],
)
async def test_a_failure_of_the_peer_frees_and_never_reads_as_our_own_refusal(
    where: str, raised: BatonError, seen: type[BatonError]
) -> None:
    async def fail() -> None:
        raise raised

    bench = Bench()
    setattr(bench if where == "before_connect" else bench.peer, where, fail)
    with pytest.raises(BatonError) as error:
        await bench.intake.take(request(), ticket())
    assert type(error.value) is seen
    assert bench.log[-1] == "abort r/0"


async def test_the_engines_own_no_passes_unchanged() -> None:
    async def refuse() -> None:
        raise InvalidRequest("no", param="prompt")

    bench = Bench()
    bench.engine.before_reserve = refuse
    with pytest.raises(InvalidRequest):
        await bench.intake.take(request(), ticket())
    assert bench.log == ["reserve"], "nothing is aborted: the key may be in use by another"


async def test_a_cancel_before_anything_is_reserved_is_the_engines() -> None:
    bench = Bench()
    gate = bench.engine.before_reserve = Gate()
    task = asyncio.create_task(bench.intake.take(request(), ticket()))
    await gate.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.log == ["reserve"] and len(bench.intake) == 0


@pytest.mark.parametrize("where", ["before_connect", "before_read", "after_read", "before_release"])
async def test_a_cancel_anywhere_frees(where: str) -> None:
    bench = Bench()
    gate = Gate()
    owner: Any = {"before_connect": bench}.get(where, bench.peer)
    setattr(owner, where, gate)
    task = asyncio.create_task(bench.intake.take(request(), ticket()))
    await gate.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.log[-1] == "abort r/0"
    assert bench.log.count("abort r/0") == 1


async def test_blocks_of_a_cancelled_read_are_freed_only_when_nothing_writes_to_them_any_more() -> None:
    bench = Bench()
    reading = asyncio.Event()
    written = asyncio.Event()
    cancelled = asyncio.Event()

    async def outlast_cancel() -> None:  # as planes do: `Connection.read`
        reading.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            await written.wait()
            bench.log.append("last write")
            raise

    bench.peer.before_read = outlast_cancel
    task = asyncio.create_task(bench.intake.take(request(), ticket()))
    await reading.wait()
    task.cancel()
    await cancelled.wait()
    assert "abort r/0" not in bench.log
    written.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.log[-2:] == ["last write", "abort r/0"]


async def test_the_lease_is_renewed_until_the_commit_and_not_after() -> None:
    bench = Bench(renew_interval_s=0.001)
    gate = Gate()
    renewals = asyncio.Semaphore(0)

    async def count() -> None:
        renewals.release()

    bench.peer.before_read = gate
    bench.peer.before_renew = count
    task = asyncio.create_task(bench.intake.take(request(), ticket()))
    async with asyncio.timeout(5):
        for _ in range(3):
            await renewals.acquire()
    gate.open.set()
    assert await task is not None
    num_renewals = bench.log.count("renew")
    await asyncio.sleep(0.01)
    assert bench.log.count("renew") == num_renewals


async def test_a_renewal_that_fails_does_not_fail_the_handoff() -> None:
    bench = Bench(renew_interval_s=0.001)
    gate = Gate()
    tried = asyncio.Semaphore(0)

    async def fail() -> None:
        tried.release()
        raise TransferError("lost")

    bench.peer.before_read = gate
    bench.peer.before_renew = fail
    task = asyncio.create_task(bench.intake.take(request(), ticket()))
    async with asyncio.timeout(5):
        await tried.acquire()
        await tried.acquire()
    gate.open.set()
    assert await task is not None


async def test_kv_that_is_rounded_on_receive_is_in_a_domain_of_its_own() -> None:
    """Blocks of it must not be found by a prompt of the same tokens that was computed here, or handed over in more bits."""
    bench = Bench()
    bench.engine.domain = "peer-domain-to-bf16"
    float32 = replace(LAYOUT, kv_dtype="float32")
    bench.peer.pool = torch.zeros(3, float32.block_bytes, dtype=torch.uint8)
    taken = await bench.intake.take(request(), ticket(layout=float32))
    assert taken is not None and taken.num_bytes == 3 * float32.block_bytes


async def test_other_blocks_of_the_same_dtype_stay_in_their_domain() -> None:
    bench = Bench()
    larger = replace(LAYOUT, block_size=16)
    bench.peer.pool = torch.zeros(3, larger.block_bytes, dtype=torch.uint8)
    taken = await bench.intake.take(request(), ticket(layout=larger, blocks=(BlockRef(2, 1),)))
    assert taken is not None and taken.num_bytes == larger.block_bytes
    assert bench.tails == [(4, 2)]


async def test_the_number_of_blocks_is_that_of_the_tickets_layout() -> None:
    bench = Bench()
    with pytest.raises(TicketMismatch) as error:
        await bench.intake.take(request(), ticket(layout=replace(LAYOUT, block_size=16)))
    assert error.value.param == "blocks" and bench.log == []
