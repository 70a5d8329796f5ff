"""Many requests through router, runs and real workers, with faults at random points: each gives the right tokens (promise P0), and all is
free in the end. What `faults/test_injected_faults.py` does to a served model, where a fault is found in seconds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from cluster.config import TransferConfig
from cluster.errors import BatonError
from cluster.faults.points import FaultAction, FaultPoint
from cluster.faults.rules import FaultInjectionConfig
from cluster.types import Request
from tests.harness import Workers, make_request, random_prompt, tiny_pool
from tests.integration.routed import Routed, routed
from tests.tiny_models import tiny_model

NUM_QUESTIONS: Final = 12
NUM_REQUESTS: Final = 150
NUM_IN_FLIGHT: Final = 8
PROBABILITY: Final = 0.03
# About ten chances an attempt, so that 0.26 of the attempts fail before their first new token: ten in a row, a chance of 2e-4 in all.
MAX_ATTEMPTS: Final = 10
TRANSFER: Final = TransferConfig(checksums=True, lease_s=2.0, renew_interval_s=0.05)


def rules() -> list[dict[str, Any]]:
    """Every action but kill at every point; a request passes `decode.tokens` many times."""
    found = []
    for point in FaultPoint:
        for action in sorted(point.actions - {FaultAction.KILL}):
            probability = PROBABILITY / 10 if (point, action) == (FaultPoint.DECODE_TOKENS, FaultAction.DROP) else PROBABILITY
            delay = {"delay_s": 0.1} if action is FaultAction.DELAY else {}
            found.append({"point": point, "action": action, "probability": probability, **delay})
    return found


def questions() -> list[dict[str, Any]]:
    """Prompts with no block, with whole blocks and with partial ones, chunked too; greedy and seeded; some end at their first token."""
    rng = random.Random(4)
    return [
        {
            "prompt": random_prompt(rng.choice((1, 8, 30, 64, 99, 200)), index),
            "max_tokens": rng.choice((1, 2, 16, 30)),
            "temperature": (index % 2) * 0.8,
            "seed": index,
        }
        for index in range(NUM_QUESTIONS)
    ]


def ask(question: dict[str, Any]) -> Request:
    return make_request(**question)


async def right_answers(folder: Path) -> list[list[int]]:
    async with Workers(folder, pool=tiny_pool(scheme="bf16", kv_dtype="bf16")) as workers:
        alone = await workers.start_colocated()
        return [(await workers.client.colocated(alone, ask(question))).token_ids for question in questions()]


@pytest.mark.parametrize("overlaps", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("plane", ["shared_memory", "grpc"])
async def test_all_answers_are_right(plane: str, overlaps: bool) -> None:
    folder = tiny_model("llama")
    right = await right_answers(folder)
    faults = FaultInjectionConfig.model_validate({"seed": 11, "rules": rules()})
    options = {"plane": plane, "pool": tiny_pool(scheme="bf16", kv_dtype="bf16"), "transfer": TRANSFER, "faults": faults}
    async with routed(folder, max_attempts=MAX_ATTEMPTS, overlaps=overlaps, **options) as cluster:
        wrong = await load(cluster, right)
        found = {f"{rule['point']} {rule['action']}": cluster.workers.num_injected(rule["point"], rule["action"]) for rule in rules()}
        print(found)
        assert not wrong, wrong
        assert sum(found.values()) > NUM_REQUESTS * PROBABILITY * 10
        await cluster.check_books()


async def load(cluster: Routed, right: list[list[int]]) -> Counter[str]:
    """A closed loop; what was wrong with the answers that were."""
    numbers = iter(range(NUM_REQUESTS))
    wrong: Counter[str] = Counter()

    async def client() -> None:
        for number in numbers:
            index = number % NUM_QUESTIONS
            try:
                tokens = await cluster.tokens(ask(questions()[index]))
            except BatonError as error:
                wrong[f"{type(error).__name__}: {error.message}"] += 1
            else:
                wrong.update([f"question {index}: {tokens}, not {right[index]}"] if tokens != right[index] else [])

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_IN_FLIGHT):
            group.create_task(client())
    return wrong
