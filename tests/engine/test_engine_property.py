"""Random mixes of requests over small pools: whatever is batched, chunked, shared, preempted, swapped, brought, interrupted or aborted,
each sequence makes the tokens it makes alone (promise P0, as far as scheduling can break it), everybody gets to an end, and nothing leaks.

The mixes come from a seeded `random.Random`, not from hypothesis strategies: those lean to small examples, which never fill a pool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.interrupt import StepInterrupted
from cluster.engine.sequence import ScheduledSequence
from cluster.types import Request, TokenOutput
from tests.engine.drive import Arrival, Drive, Kind
from tests.engine.fakes import VOCAB_SIZE, FakeRunner, Pool, generate_alone, make_engine, make_request

MAX_MODEL_LEN = 44
PREFIXES = [[(7 * p + i) % VOCAB_SIZE for i in range(20)] for p in range(2)]
SEEDS = st.integers(0, 2**32)


def random_request(rng: random.Random, name: str) -> Request:
    shared = rng.choice(PREFIXES)[: rng.choice([0, 0, 0, 4, 8, 9, 16])]
    own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0 if shared else 1, 10))]
    return make_request(
        name,
        shared + own,
        rng.choice([1, 2, 12, 25, 30, 40]),
        priority=rng.randint(0, 5),
        ignore_eos=rng.random() < 0.8,
        min_tokens=rng.choice([0, 0, 3]),
        stop_token_ids=rng.choice([(), (), (3, 44)]),
    )


def random_plan(rng: random.Random, kinds: list[Kind]) -> list[Arrival]:
    plan = []
    last_step, abort_rate = rng.choice([1, 30]), rng.choice([0.0, 0.0, 0.3])
    for index in range(rng.randint(3, 10)):
        request, kind = random_request(rng, f"r{index}"), rng.choice(kinds)
        if kind == "decode" and len(generate_alone(request, MAX_MODEL_LEN)[0]) == 1:
            kind = "prefill"  # it ends at its first token
        abort_after = rng.randint(0, 25) if rng.random() < abort_rate else None
        domain = rng.choice(["fake", "other"])
        plan.append(Arrival(request, rng.randint(0, last_step), abort_after, kind, rng.randint(0, 12), domain))
    return plan


def random_pool(rng: random.Random) -> Pool:
    return Pool(
        num_blocks=rng.choice([11, 11, 12, 14, 16]),  # the longest sequence needs 11
        num_swap_slots=rng.choice([0, 1, 2, 3, 4, 5, 7, 9, 12, 60]),
        max_num_seqs=rng.choice([1, 2, 3, 6, 9]),
        max_num_batched_tokens=rng.choice([8, 17, 64]),
        num_reserved_blocks=rng.randint(0, 2),
    )


class InterruptedRunner:
    """Some of its steps end early, the worst way: when they have written everything."""

    def __init__(self, runner: FakeRunner, rng: random.Random) -> None:
        self._runner = runner
        self._rng = rng
        self._rate = rng.choice([0.0, 0.2])
        self.interrupt = runner.interrupt

    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[TokenOutput | None]:
        outputs = self._runner.run(scheduled)
        if self._rng.random() < self._rate:
            raise StepInterrupted
        return outputs


def check(rng: random.Random, kinds: list[Kind]) -> None:
    plan = random_plan(rng, kinds)
    pool, prefix_caching = random_pool(rng), rng.random() < 0.8
    engine, _ = make_engine(
        pool, max_model_len=MAX_MODEL_LEN, prefix_caching=prefix_caching, wrap=lambda runner: InterruptedRunner(runner, rng)
    )
    drive = Drive(engine, plan)
    drive.run()
    drive.check_outputs(MAX_MODEL_LEN)
    drive.check_idle()


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS)
def test_everyone_makes_the_tokens_it_makes_alone(seed: int) -> None:
    check(random.Random(seed), ["generate"])


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS)
def test_a_decode_pool_makes_the_tokens_of_one_engine(seed: int) -> None:
    check(random.Random(seed), ["decode"])


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS)
def test_prefills_decodes_and_whole_requests_share_an_engine(seed: int) -> None:
    check(random.Random(seed), ["generate", "prefill", "decode"])
