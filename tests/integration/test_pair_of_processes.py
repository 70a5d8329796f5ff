"""Promise P1 over every plane that crosses from one process to another, with blocks of the same size, of half and of twice the size.

KV is fetched while the prompt is computed, and after it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.config import PoolConfig, TransferConfig
from tests.harness import Workers, check_books, make_request, random_prompt, tiny_pool
from tests.integration.prefill_elsewhere import prefill_elsewhere
from tests.integration.test_pair import SAMPLINGS
from tests.kv_transfer.planes import NEEDS_NIXL
from tests.other_process import OtherProcess
from tests.tiny_models import tiny_model

PREFILL_SIZE = 32
DECODE_SIZES = {"same": 32, "half": 16, "double": 64}
# Shorter than a block, just full blocks, and partial last blocks, of each size. The longest takes several chunks of 32 tokens.
PROMPT_LENGTHS = (1, 15, 16, 31, 32, 33, 64, 65, 128, 150)
GREEDY: dict[str, Any] = {"temperature": 0.0, "num_logprobs": 3}
SEEDED = SAMPLINGS[1]
STOPPING = SAMPLINGS[3]  # at the end token, where it comes
# A small staging area, so that a prompt which is repacked goes through it in several parts.
TRANSFER = TransferConfig(staging_bytes=100_000, checksums=True)


def pool(block_size: int) -> PoolConfig:
    """Bf16 on the native kernels, where all must be equal to the last bit."""
    return tiny_pool(block_size=block_size, kv_cache_bytes="4MiB", scheme="bf16", kv_dtype="bf16")


@pytest.mark.parametrize("plane", ["shared_memory", pytest.param("nixl", marks=NEEDS_NIXL), "grpc"])
@pytest.mark.parametrize("size", DECODE_SIZES)
async def test_a_pair_of_processes_equals_one_engine(plane: str, size: str, there: OtherProcess) -> None:
    """One engine with decode's blocks says what comes out, and one with prefill's how much of the prompt was cached."""
    folder, ours = tiny_model("llama"), pool(DECODE_SIZES[size])
    async with (
        Workers(folder, plane, ours, TRANSFER) as workers,
        prefill_elsewhere(there, folder, plane, pool(PREFILL_SIZE), TRANSFER) as prefill,
    ):
        decode, alone = await workers.start_decode(), await workers.start_colocated()
        counting = await workers.start_colocated(pool(PREFILL_SIZE))
        during, after = workers.client.overlapped, workers.client.disaggregated
        # All but the first with prefix hits, on every worker.
        for sampling, ask in ((GREEDY, during), (GREEDY, after), (SEEDED, during), (STOPPING, after)):
            requests = [make_request(random_prompt(length), **sampling) for length in PROMPT_LENGTHS]
            found = await asyncio.gather(*(ask(prefill, decode, request) for request in requests))
            for answer, request in zip(found, requests, strict=True):
                expected = await workers.client.colocated(alone, request)
                assert answer.outputs == expected.outputs, "logprobs too, to the last bit"
                assert answer.finish_reason == expected.finish_reason
                assert answer.num_cached_tokens == (await workers.client.colocated(counting, request)).num_cached_tokens
        assert [choice.plane for choice in decode.peers.choices] == [plane]
        await check_books(decode, alone, counting)
