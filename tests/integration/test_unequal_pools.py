"""Promise P1 with pools whose KV blocks differ: another block size, another packing, another dtype.

The same over every plane that crosses between processes: `test_pair_of_processes`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.config import PoolConfig, TransferConfig
from cluster.errors import TicketMismatch
from cluster.types import Request
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.harness import Workers, check_books, error_of, make_request, random_prompt, tiny_pool
from tests.integration.test_pair import SAMPLINGS, assert_same_output
from tests.tiny_models import tiny_model
from tests.worker_client import Answer

SIZES = (16, 32, 64)
PROMPT_LENGTHS = (1, 15, 16, 33, 64, 65, 128)
SCHEMES: dict[str, dict[str, Any]] = {
    "float32": {"scheme": "float32", "kv_dtype": "float32"},
    "bf16": {"scheme": "bf16", "kv_dtype": "bf16"},
    "int8+kv8": {"scheme": "int8", "kv_dtype": "int8"},
}
# Small, so that a prompt goes through it in several parts.
SMALL_STAGING = TransferConfig(staging_bytes=100_000, checksums=True)


def pool(block_size: int, **fields: Any) -> PoolConfig:
    return tiny_pool(block_size=block_size, kv_cache_bytes="4MiB", **fields)


def requests(sampling: dict[str, Any], lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[Request]:
    return [make_request(random_prompt(length), **sampling) for length in lengths]


async def answers(workers: Workers, prefill: PrefillWorker, decode: DecodeWorker, asked: list[Request]) -> list[Answer]:
    return await asyncio.gather(*(workers.client.disaggregated(prefill, decode, request) for request in asked))


@pytest.mark.parametrize("prefill_size", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_the_block_size_of_prefill_changes_nothing(prefill_size: int, scheme: str) -> None:
    """Decode has blocks of 32: prefill's are the same, smaller or larger; one worker alone with decode's blocks is the oracle."""
    async with Workers(tiny_model("llama"), "in_process", pool(32, **SCHEMES[scheme]), SMALL_STAGING) as workers:
        prefill, decode = await workers.start_prefill(pool(prefill_size, **SCHEMES[scheme])), await workers.start_decode()
        alone = await workers.start_colocated()
        for sampling in SAMPLINGS[:2]:
            for _ in range(2):  # the second time with prefix hits on every worker, whose ends lie elsewhere
                found = await answers(workers, prefill, decode, requests(sampling))
                expected = [await workers.client.colocated(alone, request) for request in requests(sampling)]
                for one, other in zip(found, expected, strict=True):
                    assert_same_output(one, other, scheme)
        await check_books(prefill, decode, alone)


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16 to int8": ({"scheme": "bf16", "kv_dtype": "bf16"}, {"scheme": "int8", "kv_dtype": "int8"}),
    "rows to vnni": ({"scheme": "bf16", "kv_dtype": "bf16", "kernels": "torch"}, {"scheme": "bf16", "kv_dtype": "bf16"}),
    "vnni to rows": ({"scheme": "bf16", "kv_dtype": "bf16"}, {"scheme": "bf16", "kv_dtype": "bf16", "kernels": "torch"}),
}  # not from float32, whose last bits depend on the batch, so that what they are rounded to may differ by a level


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("prefill_size", SIZES)
async def test_an_unequal_pair_is_a_domain_of_its_own(pair: str, prefill_size: int) -> None:
    """Its answers are the same whatever is cached on either side, in a crowd as alone, and do not depend on prefill's blocks."""
    source, destination = PAIRS[pair]
    lengths = (9, 40, 64, 100)
    async with Workers(tiny_model("llama"), transfer=SMALL_STAGING) as workers:
        prefill, decode = await workers.start_prefill(pool(prefill_size, **source)), await workers.start_decode(pool(32, **destination))
        equal = await workers.start_prefill(pool(32, **source))
        found = [await answers(workers, equal, decode, requests(SAMPLINGS[1], lengths))]
        for forget in ((), (decode,), (prefill,), (prefill, decode)):
            for worker in forget:
                await worker.engine_loop.run(lambda engine: engine.forget_cached_blocks())
            found.append(await answers(workers, prefill, decode, requests(SAMPLINGS[1], lengths)))
        for answer in found:
            assert [one.outputs for one in answer] == [one.outputs for one in found[0]]
        await check_books(prefill, decode, equal)


@pytest.mark.parametrize(("decode_scheme", "tolerance"), [("bf16", 0.1), ("int8+kv8", 0.25)])
async def test_float32_is_rounded_as_it_arrives(decode_scheme: str, tolerance: float) -> None:
    """The first step over the received KV says what float32 says, but for the decode scheme's own rounding."""
    sampling = {"temperature": 0.0, "num_logprobs": 5, "max_tokens": 2}
    async with Workers(tiny_model("llama"), transfer=SMALL_STAGING) as workers:
        prefill, alone = await workers.start_prefill(pool(16, **SCHEMES["float32"])), await workers.start_colocated()
        decode = await workers.start_decode(pool(32, **SCHEMES[decode_scheme]))
        found = await answers(workers, prefill, decode, requests(sampling))
        for answer, request in zip(found, requests(sampling), strict=True):
            exact = await workers.client.colocated(alone, request)
            assert answer.token_ids[0] == exact.token_ids[0]
            ours, theirs = (dict(one.outputs[1].top_logprobs) for one in (answer, exact))
            common = ours.keys() & theirs.keys()
            assert len(common) >= 3 and all(abs(ours[token] - theirs[token]) < tolerance for token in common)
        await check_books(prefill, decode, alone)


@pytest.mark.parametrize("prefill_size", SIZES)
async def test_only_the_peers_blocks_with_missing_tokens_travel(prefill_size: int) -> None:
    async with Workers(tiny_model("llama"), transfer=SMALL_STAGING) as workers:
        prefill = await workers.start_prefill(pool(prefill_size, **SCHEMES["bf16"]))
        decode = await workers.start_decode(pool(32, **SCHEMES["bf16"]))
        block_bytes = prefill.engine.layout.block_bytes
        moved = []
        for tail in (1, 2):
            request = make_request([*random_prompt(96), tail, tail, tail])
            first = await workers.client.first_token(workers.client.prefill(prefill, request))
            taken = await anext(aiter(workers.client.decode(decode, request, first.ticket)))
            moved.append(taken.taken.num_bytes // block_bytes)
            first.call.cancel()
        # 99 tokens, then those from the 96th on: with blocks of 64 they are in the second one, of which decode has a half
        assert moved == [-(-99 // prefill_size), 1]
        await check_books(prefill, decode)


async def test_kv_in_fewer_bits_is_refused_by_the_field() -> None:
    async with Workers(tiny_model("llama")) as workers:
        prefill = await workers.start_prefill(pool(16, **SCHEMES["int8+kv8"]))
        decode = await workers.start_decode(pool(16, **SCHEMES["bf16"]))
        request = make_request(random_prompt(20))
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        error = await error_of(workers.client.decode(decode, request, first.ticket))
        assert isinstance(error, TicketMismatch) and error.param == "layout"
        assert "kv_dtype: int8 cannot become bf16" in error.message
        first.call.cancel()
        await check_books(prefill, decode)
