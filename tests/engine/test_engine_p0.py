"""Promise P0 with real models: a request's tokens and logprobs are the same bits however the engine got to them.

float32 is left out of the bit-equality (torch's own float32 products depend on the batch): there the tokens are equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from cluster.config import EngineConfig
from cluster.engine.build import build_engine
from cluster.engine.engine import Engine
from cluster.engine.events import Allocated, EngineEvent, Failed, Token
from cluster.kv_layout import KVLayout
from cluster.types import OrderKey, Request, SamplingParams, TokenOutput
from tests.tiny_models import VOCAB_SIZE, tiny_model

BLOCK_SIZE = 16
HEAD_DIMS = {"llama": 16, "qwen3": 32}
MAX_TOKENS = 24
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 70)
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    {"temperature": 1.2, "top_k": 20, "seed": 12, "repetition_penalty": 1.1, "presence_penalty": 0.3},
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(
    scope="module",
    params=["bf16/bf16/torch", "int8/bf16/torch", "bf16/bf16/native", "int8/bf16/native", "int4/bf16/native", "int8/int8/native"],
)
def domain(request: pytest.FixtureRequest) -> str:
    if request.param.endswith("native"):
        request.getfixturevalue("native")
    return str(request.param)


@dataclass(frozen=True)
class Outcome:
    """What a client would see."""

    tokens: list[int]
    logprobs: list[float | None]
    top_logprobs: list[tuple[tuple[int, float], ...]]


def make_engine(
    domain: str, *, family: str = "llama", num_blocks: int = 64, max_num_batched_tokens: int = 512, max_num_seqs: int = 16, **more: object
) -> Engine:
    scheme, kv_dtype, kernels = domain.split("/")
    fields = {
        "scheme": scheme,
        "kv_dtype": kv_dtype,
        "kernels": kernels,
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    layout = KVLayout(3, 2, HEAD_DIMS[family], BLOCK_SIZE, kv_dtype)
    config = EngineConfig.model_validate(
        {
            **fields,
            "max_num_seqs": max_num_seqs,
            "kv_cache_bytes": num_blocks * layout.block_bytes,
            "swap_bytes": 64 * layout.block_bytes,
            **more,
        }
    )
    engine = build_engine(config, tiny_model(family), max_model_len=256)
    assert engine.num_blocks == num_blocks
    return engine


def make_requests() -> list[Request]:
    rng = random.Random(3)
    requests = []
    for index, length in enumerate(LENGTHS):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, num_logprobs=3, **({"seed": 0} | SAMPLING[index % 3]))  # type: ignore[arg-type]
        requests.append(Request(f"r{index}", 0, prompt, params, OrderKey(float(index), index)))
    return requests


def generate(engine: Engine, requests: Sequence[Request]) -> dict[str, list[EngineEvent]]:
    for request in requests:
        engine.add(request, stop_after_first_token=False)
    events: dict[str, list[EngineEvent]] = {request.key: [] for request in requests}
    while engine.has_work:
        for key, event in engine.step():
            assert not isinstance(event, Failed), event.message
            events[key].append(event)
    engine.check_integrity()
    assert engine.load().num_blocks_owned == 0
    return events


def outcome(outputs: Sequence[TokenOutput]) -> Outcome:
    return Outcome([o.token_id for o in outputs], [o.logprob for o in outputs], [o.top_logprobs for o in outputs])


def outcomes(engine: Engine, requests: Sequence[Request]) -> list[Outcome]:
    events = generate(engine, requests)
    return [outcome([e.output for e in events[request.key] if isinstance(e, Token)]) for request in requests]


def each_alone(engine: Engine, requests: Sequence[Request]) -> list[Outcome]:
    return [outcomes(engine, [request])[0] for request in requests]


@pytest.fixture(scope="module")
def alone(domain: str) -> list[Outcome]:
    result = each_alone(make_engine(domain, prefix_caching=False), make_requests())
    assert all(len(each.tokens) == MAX_TOKENS and None not in each.logprobs for each in result)
    assert len({tuple(each.tokens) for each in result}) == len(result)
    return result


@pytest.mark.parametrize("max_num_batched_tokens", [8, 17, 512])
def test_batched_and_chunked(domain: str, alone: list[Outcome], max_num_batched_tokens: int) -> None:
    assert outcomes(make_engine(domain, max_num_batched_tokens=max_num_batched_tokens), make_requests()) == alone


def test_with_a_prefix_hit(domain: str, alone: list[Outcome]) -> None:
    engine, requests = make_engine(domain), make_requests()
    generate(engine, requests)
    events = generate(engine, requests)
    hits = [e.num_cached_tokens for request in requests for e in events[request.key] if isinstance(e, Allocated)]
    assert hits == [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS]
    assert [outcome([e.output for e in events[request.key] if isinstance(e, Token)]) for request in requests] == alone


def test_prompt_that_continues_generated_tokens_hits_them(domain: str) -> None:
    """Where the KV of decode steps is the KV that prefill would compute, a chat's next turn shares it; elsewhere it does not."""
    first = make_requests()[4]
    engine, fresh = make_engine(domain), make_engine(domain, prefix_caching=False)
    tokens = outcomes(engine, [first])[0].tokens
    longer = (*first.prompt_token_ids, *tokens, 5, 6, 7)
    second = Request("next", 0, longer, first.sampling, OrderKey(9.0, 9))
    events = generate(engine, [second])[second.key]
    num_shareable = 70 + MAX_TOKENS - 1 if engine.identity.shares_generated else 70
    assert isinstance(events[0], Allocated) and events[0].num_cached_tokens == num_shareable // BLOCK_SIZE * BLOCK_SIZE
    assert outcome([e.output for e in events if isinstance(e, Token)]) == outcomes(fresh, [second])[0]


def test_generated_kv_is_shared_only_where_it_is_what_a_prefill_computes(domain: str) -> None:
    """With heads large enough for every instruction set's own kernels."""
    engine = make_engine(domain, family="qwen3")
    prompt = make_requests()[4]
    tokens = outcomes(engine, [prompt])[0].tokens
    continued = Request("next", 0, (*prompt.prompt_token_ids, *tokens), prompt.sampling, OrderKey(9.0, 9))
    fresh = make_engine(domain, family="qwen3", prefix_caching=False)
    assert outcomes(engine, [continued]) == outcomes(fresh, [continued])


def test_with_preemption_and_swap(domain: str, alone: list[Outcome]) -> None:
    engine = make_engine(domain, num_blocks=10, reserve_fraction=0.0)
    assert outcomes(engine, make_requests()) == alone
    assert engine.load().num_preemptions > 0


def test_handed_over_to_another_engine(domain: str, alone: list[Outcome]) -> None:
    prefill, decode, requests = make_engine(domain), make_engine(domain), make_requests()
    firsts = {}
    events: dict[str, list[TokenOutput]] = {}
    for request in requests:
        prefill.add(request, stop_after_first_token=True)
    blocks = {}
    while prefill.has_work:
        for key, event in prefill.step():
            if isinstance(event, Allocated):
                blocks[key] = [ref.block_id for ref in event.blocks]
            elif isinstance(event, Token):
                firsts[key] = event.output
    for request in requests:
        reservation = decode.reserve(request, prefill.domain, request.num_prompt_tokens)
        assert reservation is not None
        decode.kv_cache.write_blocks(reservation.block_ids, prefill.kv_cache.read_blocks(blocks[request.key]))
        decode.start(request.key, firsts[request.key])
        prefill.release_lease(request.key)
        events[request.key] = [firsts[request.key]]
    while decode.has_work:
        for key, event in decode.step():
            assert isinstance(event, Token)
            events[key].append(event.output)
    assert [outcome(events[request.key]) for request in requests] == alone
    for engine in (prefill, decode):
        engine.check_integrity()
        assert engine.load().num_blocks_owned == engine.load().num_blocks_leased == 0


@pytest.mark.parametrize("num_generated", [1, 7, MAX_TOKENS - 1])
def test_resumed_after_what_an_earlier_attempt_generated(domain: str, alone: list[Outcome], num_generated: int) -> None:
    earlier = [tuple(each.tokens[:num_generated]) for each in alone]
    requests = [replace(request, generated_token_ids=ids) for request, ids in zip(make_requests(), earlier, strict=True)]
    rest = [Outcome(each.tokens[num_generated:], each.logprobs[num_generated:], each.top_logprobs[num_generated:]) for each in alone]
    assert outcomes(make_engine(domain, max_num_batched_tokens=24), requests) == rest


def test_float32_makes_equal_tokens() -> None:
    requests = make_requests()
    expected = [each.tokens for each in each_alone(make_engine("float32/float32/torch", prefix_caching=False), requests)]
    for engine in (
        make_engine("float32/float32/torch", max_num_batched_tokens=8),
        make_engine("float32/float32/torch", max_num_batched_tokens=17),
        make_engine("float32/float32/torch", num_blocks=10, reserve_fraction=0.0),
    ):
        assert [each.tokens for each in outcomes(engine, requests)] == expected
