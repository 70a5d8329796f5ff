"""Promise P1 with real engines over real wires: a prefill worker and a decode worker answer exactly as one worker does alone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from cluster.config import TransferConfig
from cluster.errors import TicketStale
from cluster.types import Request
from tests.harness import Workers, check_books, error_of, make_request, random_prompt, tiny_pool
from tests.kv_transfer.planes import PLANES
from tests.tiny_models import oracle, tiny_model
from tests.worker_client import Answer

BLOCK_SIZE = 8
PROMPT_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 100)  # the last one: several chunks of 32 tokens
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.95, "top_k": 50, "num_logprobs": 3},
    {"temperature": 0.0, "num_logprobs": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 1.2, "seed": 2**63, "num_logprobs": 1, "min_tokens": 5, "ignore_eos": False, "max_tokens": 24},
)
SCHEMES = {
    "float32": tiny_pool(),
    "bf16": tiny_pool(scheme="bf16", kv_dtype="bf16"),
    "int8": tiny_pool(scheme="int8", kv_dtype="bf16"),
}


def twins(length: int, sampling: dict[str, Any], seed: int = 0) -> tuple[Request, Request]:
    """The same request under two names."""
    tokens = random_prompt(length, seed)
    return make_request(tokens, **sampling), make_request(tokens, **sampling)


def assert_equal(found: Answer, expected: Answer, scheme: str) -> None:
    assert_same_output(found, expected, scheme)
    assert found.num_cached_tokens == expected.num_cached_tokens


def assert_same_output(found: Answer, expected: Answer, scheme: str) -> None:
    """All but the prompt's cached tokens, which come in blocks of prefill's size."""
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    if scheme != "float32":
        assert found.outputs == expected.outputs, "logprobs must be equal to the last bit"
        return
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert one.logprob == (None if other.logprob is None else pytest.approx(other.logprob, abs=1e-4))
        assert [token for token, _ in one.top_logprobs] == [token for token, _ in other.top_logprobs]


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_disaggregated_equals_monolithic(plane: str, scheme: str) -> None:
    async with Workers(tiny_model("llama"), plane, SCHEMES[scheme]) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        alone = await workers.start_colocated()
        for sampling in SAMPLINGS:
            for way in (
                workers.client.overlapped,
                workers.client.disaggregated,
                workers.client.overlapped,
            ):  # the first one without prefix hits
                pairs = [twins(length, sampling) for length in PROMPT_LENGTHS]
                found = [way(prefill, decode, ours) for ours, _ in pairs]
                expected = [workers.client.colocated(alone, theirs) for _, theirs in pairs]
                answers = await asyncio.gather(*found, *expected)
                for one, other in zip(answers[: len(pairs)], answers[len(pairs) :], strict=True):
                    assert_equal(one, other, scheme)
        await check_books(prefill, decode, alone)


@pytest.mark.parametrize("plane", PLANES)
async def test_a_crowd_gets_the_same_answers_as_each_alone(plane: str) -> None:
    async with Workers(tiny_model("llama"), plane, SCHEMES["int8"]) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        alone = await workers.start_colocated()
        pairs = [twins(length, SAMPLINGS[1], seed) for seed, length in enumerate((3, 8, 17, 40, 64, 99))]
        expected = [await workers.client.colocated(alone, theirs) for _, theirs in pairs]
        found = await asyncio.gather(*(workers.client.disaggregated(prefill, decode, ours) for ours, _ in pairs))
        assert [answer.outputs for answer in found] == [answer.outputs for answer in expected]
        await check_books(prefill, decode, alone)


async def test_sequences_that_were_preempted_on_decode_answer_the_same() -> None:
    requests = [make_request(random_prompt(20, seed), max_tokens=40, **SAMPLINGS[1]) for seed in range(5)]
    async with Workers(tiny_model("llama"), pool=SCHEMES["int8"]) as workers:
        alone, prefill = await workers.start_colocated(), await workers.start_prefill()
        block_bytes = alone.engine.layout.block_bytes
        decode = await workers.start_decode(SCHEMES["int8"].model_copy(update={"kv_cache_bytes": 18 * block_bytes}))  # each comes to 8
        expected = [await workers.client.colocated(alone, request) for request in requests]
        found = await asyncio.gather(*(workers.client.disaggregated(prefill, decode, request) for request in requests))
        assert [answer.outputs for answer in found] == [answer.outputs for answer in expected]
        assert decode.engine_loop.load().num_preemptions > 0, "the test must have made blocks scarce"
        await check_books(prefill, decode, alone)


async def test_pools_of_two_schemes_are_a_domain_of_their_own() -> None:
    """The answer is the pair's: the same with and without prefix hits on either side, and no longer that of one scheme alone."""
    async with Workers(tiny_model("llama")) as workers:
        prefill, decode = await workers.start_prefill(SCHEMES["bf16"]), await workers.start_decode(SCHEMES["int8"])
        prompts = [random_prompt(length) for length in (9, 40, 100)]
        answers = []
        for forget in ((), (decode,), (prefill,), (prefill, decode)):
            for worker in forget:
                await worker.engine_loop.run(lambda engine: engine.forget_cached_blocks())
            requests = [make_request(tokens, **SAMPLINGS[1]) for tokens in prompts]
            runs = (workers.client.disaggregated(prefill, decode, request) for request in requests)
            answers.append([answer.outputs for answer in await asyncio.gather(*runs)])
        assert all(answer == answers[0] for answer in answers)
        await check_books(prefill, decode)


async def test_float32_over_the_wire_equals_transformers() -> None:
    model = oracle("llama")
    async with Workers(tiny_model("llama")) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        for length in PROMPT_LENGTHS:
            tokens = random_prompt(length)
            answer = await workers.client.disaggregated(prefill, decode, make_request(tokens, max_tokens=32))
            with torch.no_grad():
                expected = model.generate(torch.tensor([tokens]), max_new_tokens=32, min_new_tokens=32, do_sample=False)[0, length:]
            assert answer.token_ids == expected.tolist()


async def test_one_token_has_no_decode_leg() -> None:
    async with Workers(tiny_model("llama")) as workers:
        prefill, decode, alone = await workers.start_prefill(), await workers.start_decode(), await workers.start_colocated()
        ours, theirs = twins(20, {"max_tokens": 1, "num_logprobs": 2})
        answer = await workers.client.disaggregated(prefill, decode, ours)
        assert_equal(answer, await workers.client.colocated(alone, theirs), "float32")
        assert len(answer.outputs) == 1
        await check_books(prefill, decode, alone)


async def test_a_prefix_that_decode_holds_does_not_travel_again() -> None:
    async with Workers(tiny_model("llama")) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        block_bytes = decode.engine.layout.block_bytes
        moved = []
        for tail in (1, 2):
            request = make_request([*random_prompt(64), tail, tail, tail])
            first = await workers.client.first_token(workers.client.prefill(prefill, request))
            taken = await anext(aiter(workers.client.decode(decode, request, first.ticket)))
            moved.append(taken.taken.num_bytes)
        assert moved == [9 * block_bytes, block_bytes]


@pytest.mark.parametrize("plane", PLANES)
async def test_blocks_travel_while_their_prompt_is_computed(plane: str) -> None:
    """Each chunk of a prompt is computed only when the blocks of those before it are at the decode worker."""
    async with Workers(tiny_model("llama"), plane, transfer=TransferConfig(checksums=True)) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        run = prefill.engine._runner.run
        num_arrived = []

        def run_when_arrived(rows: Any) -> Any:
            expected = rows[0].sequence.num_computed_tokens // BLOCK_SIZE
            deadline_s = time.monotonic() + 10
            while (arrived := int(decode.engine.kv_cache.storage.any(dim=1).sum())) < expected and time.monotonic() < deadline_s:
                time.sleep(0.002)
            num_arrived.append(arrived)
            return run(rows)

        prefill.engine._runner.run = run_when_arrived  # type: ignore[method-assign, assignment]
        ours, theirs = twins(100, SAMPLINGS[1])
        answer = await workers.client.overlapped(prefill, decode, ours)
        assert num_arrived == [0, 4, 8, 12], "chunks of 32 tokens"
        assert_equal(answer, await workers.client.colocated(await workers.start_colocated(), theirs), "float32")
        await check_books(prefill, decode)


@pytest.mark.parametrize("moment", ["offer", "ready", "first_token"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_leg_that_is_cancelled_in_the_overlap_leaves_nothing(moment: str, leg: str) -> None:
    async with Workers(tiny_model("llama")) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        request = make_request(random_prompt(100))
        prefilling = workers.client.prefill(prefill, request)
        decoding = None
        async for event in prefilling:
            if event.WhichOneof("event") == "offer":
                decoding = workers.client.decode(decode, request, event.offer.ticket)
            if event.WhichOneof("event") == moment:
                break
        assert decoding is not None
        if leg == "decode":
            decoding.cancel()
            prefilling.cancel()
        else:
            prefilling.cancel()
            if moment != "first_token":  # then the KV may have been taken
                assert isinstance(await error_of(decoding), TicketStale)
            decoding.cancel()
        await check_books(prefill, decode)


async def test_pools_with_checksums_agree() -> None:
    async with Workers(tiny_model("llama"), transfer=TransferConfig(checksums=True)) as workers:
        prefill, decode = await workers.start_prefill(), await workers.start_decode()
        request = make_request(random_prompt(50))
        first = await workers.client.first_token(workers.client.prefill(prefill, request))
        assert len(first.decoded_ticket.checksums) == 7
        events = [event async for event in workers.client.decode(decode, request, first.ticket)]
        assert events[0].WhichOneof("event") == "taken"
        first.call.cancel()
        await check_books(prefill, decode)
