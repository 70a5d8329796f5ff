"""A request that goes on where an earlier attempt ended: what that one generated is computed again, step by step, and not given out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.engine.engine import Engine
from cluster.engine.events import Token
from cluster.errors import InvalidRequest
from cluster.types import FinishReason, Request, TokenOutput
from tests.engine.drive import write_kv
from tests.engine.fakes import VOCAB_SIZE, FakeRunner, Pool, generate_alone, make_engine, make_request, next_token

PROMPT = tuple(range(10, 21))
NUM_TOKENS = 14


def make(name: str = "r") -> tuple[Request, list[int]]:
    """A request, and all that it makes."""
    request = make_request(name, PROMPT, NUM_TOKENS, ignore_eos=True)
    return request, generate_alone(request, 120)[0]


def tokens_of(engine: Engine, key: str) -> list[Token]:
    events = []
    while engine.has_work:
        events += [event for owner, event in engine.step() if owner == key and isinstance(event, Token)]
        engine.check_integrity()
    return events


def resume(engine: Engine, request: Request, *, by_reservation: bool) -> None:
    if not by_reservation:
        engine.add(request, stop_after_first_token=False)
        return
    reservation = engine.reserve(request, "fake", request.num_prompt_tokens)
    assert reservation is not None
    write_kv(engine, reservation, request.prompt_token_ids)
    engine.start(request.key, TokenOutput(next_token(request.prompt_token_ids)))


@pytest.mark.parametrize("by_reservation", [True, False])
@pytest.mark.parametrize("num_generated", [1, 2, 5, NUM_TOKENS - 1])
def test_goes_on_after_what_was_generated(num_generated: int, by_reservation: bool) -> None:
    engine, runner = make_engine()
    request, expected = make()
    request = replace(request, attempt=2, generated_token_ids=tuple(expected[:num_generated]))
    resume(engine, request, by_reservation=by_reservation)
    tokens = tokens_of(engine, request.key)
    assert [token.output.token_id for token in tokens] == expected[num_generated:]
    assert tokens[-1].finish_reason is FinishReason.LENGTH
    after_prompt = [num_tokens for step in runner.steps for _, num_tokens in step][0 if by_reservation else 1 :]
    assert after_prompt == [1] * (NUM_TOKENS - 1), "each generated token is a decode step, as it was"
    assert engine.load().num_blocks_owned == 0


def test_others_run_beside_and_it_can_be_preempted() -> None:
    engine, _ = make_engine(Pool(num_blocks=8, num_reserved_blocks=0))
    first, first_tokens = make("a")
    request, expected = make("b")
    second = replace(request, order_key=replace(request.order_key, virtual_deadline_s=1.0), generated_token_ids=tuple(expected[:9]))
    resume(engine, second, by_reservation=False)
    engine.step()
    engine.add(first, stop_after_first_token=False)
    made: dict[str, list[int]] = {first.key: [], second.key: []}
    while engine.has_work:
        for key, event in engine.step():
            if isinstance(event, Token):
                made[key].append(event.output.token_id)
        engine.check_integrity()
    assert made == {first.key: first_tokens, second.key: expected[9:]}
    assert engine.load().num_preemptions > 0


def test_a_prefill_samples_its_first_token_anew() -> None:
    engine, _ = make_engine()
    request, expected = make()
    engine.add(replace(request, generated_token_ids=tuple(expected[:3])), stop_after_first_token=True)
    assert [token.output.token_id for token in tokens_of(engine, request.key)] == expected[:1]
    engine.release_lease(request.key)


@pytest.mark.parametrize(
    "generated", [(VOCAB_SIZE,), (-1,), tuple([1] * NUM_TOKENS)], ids=["out of the vocabulary", "negative", "nothing left to generate"]
)
def test_refuses_by_name(generated: tuple[int, ...]) -> None:
    engine, _ = make_engine()
    request = replace(make()[0], generated_token_ids=generated)
    with pytest.raises(InvalidRequest) as caught:
        engine.add(request, stop_after_first_token=False)
    assert caught.value.param == "generated_token_ids"


def test_another_first_token_than_before_is_refused() -> None:
    engine, _ = make_engine()
    request, expected = make()
    request = replace(request, generated_token_ids=((expected[0] + 1) % VOCAB_SIZE,))
    with pytest.raises(InvalidRequest) as caught:
        resume(engine, request, by_reservation=True)
    assert caught.value.param == "first_token"
    assert engine.load().num_blocks_owned == 0 and not engine.has_work


def test_the_runner_samples_nothing_while_tokens_are_replayed() -> None:
    engine, runner = make_engine()
    request, expected = make()
    sampled = _count_outputs(runner)
    resume(engine, replace(request, generated_token_ids=tuple(expected[:6])), by_reservation=True)
    tokens_of(engine, request.key)
    assert sum(sampled) == NUM_TOKENS - 6 and len(sampled) == NUM_TOKENS - 1


def _count_outputs(runner: FakeRunner) -> list[int]:
    """For each step from now on, how many tokens it samples."""
    counts: list[int] = []
    run = runner.run

    def counting(scheduled):  # type: ignore[no-untyped-def]
        outputs = run(scheduled)
        counts.append(sum(output is not None for output in outputs))
        return outputs

    runner.run = counting  # type: ignore[method-assign]
    return counts
