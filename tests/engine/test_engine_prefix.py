"""What an engine shares between prompts, over the fake model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.engine.engine import Engine
from cluster.engine.events import Allocated
from cluster.types import Request, TokenOutput
from tests.engine.drive import reserve_and_start, run, write_kv
from tests.engine.fakes import generate_alone, make_engine, make_request, next_token

PROMPT = list(range(10, 21))  # three blocks of four


def cached_tokens(engine: Engine, request: Request) -> int:
    engine.add(request, stop_after_first_token=False)
    return next(event.num_cached_tokens for key, event in run(engine) if isinstance(event, Allocated))


def test_a_prefix_hit_never_covers_the_last_prompt_token() -> None:
    engine, _ = make_engine()
    prompt = list(range(12))
    assert [cached_tokens(engine, make_request(name, prompt, 1)) for name in "ab"] == [0, 8]
    assert cached_tokens(engine, make_request("c", [*prompt, 1], 1)) == 12
    assert engine.forget_cached_blocks() > 0
    assert cached_tokens(engine, make_request("d", prompt, 1)) == 0


def test_tenants_share_no_prefix() -> None:
    engine, _ = make_engine()
    request = make_request("a", PROMPT, 1)
    assert cached_tokens(engine, request) == 0
    assert cached_tokens(engine, replace(request, request_id="b", cache_salt="tenant")) == 0
    assert cached_tokens(engine, replace(request, request_id="c", cache_salt="tenant")) == 8


def test_reserve_finds_the_whole_prompt_in_the_domain_of_the_ticket() -> None:
    engine, _ = make_engine()
    prompt = list(range(12))
    for domain, expected in (("other", 0), ("other", 3), ("fake", 0), ("fake", 3)):
        reservation = engine.reserve(make_request("r", prompt, 5), domain, len(prompt))
        assert reservation is not None and reservation.num_cached_blocks == expected
        write_kv(engine, reservation, tuple(prompt))
        engine.start("r/0", TokenOutput(next_token(prompt)))
        engine.abort("r/0")


@pytest.mark.parametrize(("domain", "num_hits"), [("fake", 7), ("other", 2)])
def test_generated_tokens_are_shared_only_within_the_own_domain(domain: str, num_hits: int) -> None:
    engine, _ = make_engine()
    request = make_request("r", PROMPT, 20, ignore_eos=True)
    reserve_and_start(engine, request, domain)
    run(engine)
    longer = [*PROMPT, *generate_alone(request, 120)[0]]
    reservation = engine.reserve(make_request("next", longer), domain, len(longer))
    assert reservation is not None and reservation.num_cached_blocks == num_hits
