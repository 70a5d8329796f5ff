"""Credits, pairing and the choice of workers: values in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ContextTooLong
from cluster.types import AdmitRequest, OrderKey, Placement, WorkerLoad, WorkerRole
from router.control.claims import claim_of, view_of
from router.control.credits import has_credit
from router.control.live_set import LivePlacement
from router.control.messages import Phase
from router.control.pairing import Limits, limits_of, mismatch, unserved_reason
from router.control.placement import Choice, LeastLoaded, Pools
from router.control.redirects import address_of
from router.control.workers import Worker
from tests.router.control.builders import LAYOUT, load, prefill_load, request

POLICY = LeastLoaded(max_prefill_ahead=2.0)


def worker(report: WorkerLoad) -> Worker:
    return Worker(report, 0.0, frozenset(name.rpartition("/")[0] for name in report.live_requests))


def placed(req: AdmitRequest, decode: WorkerLoad, prefill: WorkerLoad | None = None, phase: Phase = Phase.PREFILL) -> LivePlacement:
    source = None if prefill is None else address_of(prefill)
    return LivePlacement(req, Placement(req.request_id, 1, OrderKey(0, 0), address_of(decode), source), phase, 0.0)


def pools(prefill: Sequence[WorkerLoad], decode: Sequence[WorkerLoad], live: Iterable[LivePlacement] = ()) -> Pools:
    def views(reports: Sequence[WorkerLoad]) -> list[Any]:
        return [view_of(worker(r), [entry for entry in live if r.incarnation in entry.incarnations]) for r in reports]

    return {WorkerRole.PREFILL: views(prefill), WorkerRole.DECODE: views(decode)}


# ---- claims


def test_claims_by_role_and_phase() -> None:
    req = request("r", num_prompt_tokens=33, max_tokens=1000)
    assert (claim_of(req, prefill_load()).num_tokens, claim_of(req, prefill_load()).num_blocks) == (33, 3)
    decode = claim_of(req, load("d"))
    assert (decode.num_tokens, decode.num_blocks, decode.num_seqs) == (0, 7, 1)  # 33 and 64 tokens of growth
    colocated = load("c", WorkerRole.COLOCATED)
    assert claim_of(req, colocated, Phase.PREFILL).num_tokens == 33
    assert claim_of(req, colocated, Phase.DECODE).num_tokens == 0


def test_short_outputs_claim_no_more_than_they_can_grow() -> None:
    assert claim_of(request("r", 16, 1), load("d")).num_blocks == 2
    assert claim_of(request("r", 15, 1), load("d")).num_blocks == 1


def test_a_request_in_the_report_is_not_counted_twice() -> None:
    report = load("d", num_blocks_owned=20, num_seqs_running=1, live_requests=("a/2",))
    live = [placed(request("a", 32, 32), report), placed(request("b", 32, 32), report)]
    view = view_of(worker(report), live)
    assert (view.num_blocks_used, view.num_seqs) == (24, 2)  # a has grown to 20 blocks; b needs 4 that no report shows yet


def test_work_that_no_placement_knows_counts() -> None:
    view = view_of(worker(load("d", num_blocks_owned=30, num_blocks_leased=2, num_seqs_running=3, num_seqs_waiting=1)), [])
    assert (view.num_blocks_used, view.num_seqs) == (32, 4)


def test_prompt_tokens_of_an_old_report_do_not_block_an_idle_worker() -> None:
    report = prefill_load(num_tokens_waiting=4000, live_requests=("gone/1",))
    assert view_of(worker(report), []).num_tokens_ahead == 0


def test_progress_within_a_prompt_frees_budget() -> None:
    report = prefill_load(num_tokens_waiting=100, live_requests=("a/1",))
    view = view_of(worker(report), [placed(request("a", 1000), load("d"), report)])
    assert view.num_tokens_ahead == 100


# ---- credits


def test_prefill_budget() -> None:
    report = prefill_load()  # steps of 128 tokens: 256 ahead
    ahead = [placed(request("a", 200), load("d"), report)]
    view = view_of(worker(report), ahead)
    assert has_credit(view, request("b", 56), 2.0)
    assert not has_credit(view, request("b", 57), 2.0)


def test_a_long_prompt_is_placed_where_nothing_is_ahead() -> None:
    assert has_credit(view_of(worker(prefill_load()), []), request("long", 1000), 2.0)
    busy = view_of(worker(prefill_load()), [placed(request("a", 1), load("d"), prefill_load())])
    assert not has_credit(busy, request("long", 1000), 2.0)


def test_leased_blocks_take_prefill_room() -> None:
    full = view_of(worker(prefill_load(num_blocks_leased=88)), [])
    assert has_credit(full, request("a", 32), 2.0)
    assert not has_credit(full, request("a", 33), 2.0)


def test_decode_keeps_the_reserve_and_the_number_of_sequences() -> None:
    assert has_credit(view_of(worker(load("d", num_blocks_owned=86)), []), request("a", 32, 32), 2.0)
    assert not has_credit(view_of(worker(load("d", num_blocks_owned=87)), []), request("a", 32, 32), 2.0)
    assert not has_credit(view_of(worker(load("d", num_seqs_running=8)), []), request("a", 32, 32), 2.0)


def test_growth_never_keeps_out_a_prompt_that_fits_an_empty_worker() -> None:
    empty = view_of(worker(load("d", max_model_len=4096)), [])
    assert has_credit(empty, request("a", 90 * 16 - 1, 64), 2.0)


# ---- pairing


def limits(*loads: WorkerLoad) -> Limits:
    return limits_of({role: [each for each in loads if each.role is role] for role in WorkerRole})


@pytest.mark.parametrize(
    ("field", "prefill", "decode"),
    [
        ("checkpoint", prefill_load(), load("d", checkpoint="other")),
        ("num_layers", prefill_load(), load("d", layout=replace(LAYOUT, num_layers=3))),
        ("kv_dtype", prefill_load(layout=replace(LAYOUT, kv_dtype="int8", packing="vnni")), load("d")),
        ("block_size", prefill_load(), load("d", layout=replace(LAYOUT, block_size=24))),
    ],
)
def test_workers_that_differ_beyond_repacking_are_not_paired(field: str, prefill: WorkerLoad, decode: WorkerLoad) -> None:
    reason = mismatch(prefill, decode)
    assert reason is not None
    assert field in reason
    assert POLICY.choose(pools([prefill], [decode]), request("r")) is None
    assert not POLICY.is_eligible(pools([prefill], [decode]), request("r"))
    assert unserved_reason({WorkerRole.PREFILL: [prefill], WorkerRole.DECODE: [decode]}) == reason


def test_a_mismatched_worker_is_passed_over_for_one_that_pairs() -> None:
    odd = load("a", checkpoint="other")
    choice = POLICY.choose(pools([prefill_load()], [odd, load("b")]), request("r"))
    assert choice == Choice(load("b"), prefill_load())
    assert unserved_reason({WorkerRole.PREFILL: [prefill_load()], WorkerRole.DECODE: [odd, load("b")]}) is None


@pytest.mark.parametrize("changes", [{"block_size": 64}, {"block_size": 8}, {"packing": "vnni"}, {"kv_dtype": "int8", "packing": "vnni"}])
def test_workers_whose_blocks_are_repacked_do_pair(changes: dict[str, Any]) -> None:
    prefill, decode = prefill_load(), load("d", layout=replace(LAYOUT, **changes))
    assert mismatch(prefill, decode) is None
    assert POLICY.choose(pools([prefill], [decode]), request("r")) == Choice(decode, prefill)
    assert unserved_reason({WorkerRole.PREFILL: [prefill], WorkerRole.DECODE: [decode]}) is None


def test_different_domains_do_pair() -> None:
    assert mismatch(prefill_load(domain="bf16"), load("d", domain="int8")) is None


def test_context_is_the_least_of_the_pools() -> None:
    both = limits(prefill_load(max_model_len=512), load("d", max_model_len=1024))
    assert both.max_model_len == 512
    both.check(request("r", 500, 12))
    with pytest.raises(ContextTooLong) as caught:
        both.check(request("r", 500, 13))
    assert caught.value.param == "max_tokens"


def test_context_is_bounded_by_the_memory_of_a_pool() -> None:
    limits(load("d", max_model_len=10_000)).check(request("r", 90 * 16 - 1, 1))
    with pytest.raises(ContextTooLong) as caught:
        limits(load("d", max_model_len=10_000)).check(request("r", 90 * 16, 1))
    assert caught.value.param == "prompt"
    with pytest.raises(ContextTooLong):
        limits(load("d", max_model_len=10_000)).check(request("r", 16, 100 * 16))


def test_nothing_is_refused_before_workers_are_known() -> None:
    limits().check(request("r", 10**9, 10**9))


# ---- choice


def test_least_loaded_of_each_pool() -> None:
    prefills = [prefill_load("p1"), prefill_load("p2")]
    decodes = [load("d1", num_blocks_owned=50, num_seqs_running=1), load("d2", num_blocks_owned=10, num_seqs_running=4), load("d3")]
    live = [placed(request("x", 100), decodes[2], prefills[0])]
    choice = POLICY.choose(pools(prefills, decodes, live), request("r"))
    assert choice is not None
    assert choice.prefill is not None
    assert choice.prefill.worker_id == "p2"
    assert choice.decode.worker_id == "d3"  # 11 of 90 blocks and 1 of 8 sequences; d2 is half full of sequences


def test_equals_spread_by_work_done() -> None:
    choice = POLICY.choose(pools([prefill_load()], [load("d1", num_tokens_total=9), load("d2", num_tokens_total=3)]), request("r"))
    assert choice is not None
    assert choice.decode.worker_id == "d2"


def test_excluded_workers_are_never_chosen() -> None:
    both = pools([prefill_load()], [load("d1"), load("d2")])
    choice = POLICY.choose(both, request("r", exclude=("d1#1",)))
    assert choice is not None
    assert choice.decode.worker_id == "d2"
    assert POLICY.choose(both, request("r", exclude=("p#1",))) is None
    assert not POLICY.is_eligible(both, request("r", exclude=("p#1",)))


@pytest.mark.parametrize("changes", [{"num_blocks_owned": 90}, {"num_seqs_running": 8}])
def test_none_without_credit_but_still_eligible(changes: dict[str, Any]) -> None:
    full = pools([prefill_load()], [load("d", **changes)])
    assert POLICY.choose(full, request("r")) is None
    assert POLICY.is_eligible(full, request("r"))


def test_colocated_one_worker_does_both() -> None:
    workers = [load("c1", WorkerRole.COLOCATED, num_blocks_owned=90), load("c2", WorkerRole.COLOCATED)]
    choice = POLICY.choose({WorkerRole.COLOCATED: [view_of(worker(report), []) for report in workers]}, request("r"))
    assert choice == Choice(workers[1])


def test_another_decode_worker_for_the_same_kv() -> None:
    both = pools([prefill_load()], [load("d1"), load("d2", num_seqs_running=8)])
    assert POLICY.choose_decode(both, request("r"), prefill_load(), ("d1#1",), need_credit=True) is None
    other = POLICY.choose_decode(both, request("r"), prefill_load(), ("d1#1",), need_credit=False)
    assert other is not None
    assert other.worker_id == "d2"
    assert POLICY.choose_decode(both, request("r"), prefill_load(layout=replace(LAYOUT, head_dim=32)), (), need_credit=False) is None


LOADS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 8), st.integers(0, 400)), min_size=1, max_size=5)


@given(LOADS, LOADS, st.integers(1, 400), st.integers(1, 200))
def test_what_is_chosen_has_credit_and_the_input_decides(
    prefills: list[tuple[int, int, int]], decodes: list[tuple[int, int, int]], num_prompt_tokens: int, max_tokens: int
) -> None:
    def reports(role: WorkerRole, rows: list[tuple[int, int, int]]) -> list[WorkerLoad]:
        return [
            load(f"{role}{i}", role, num_blocks_owned=blocks, num_seqs_running=seqs, num_tokens_waiting=tokens)
            for i, (blocks, seqs, tokens) in enumerate(rows)
        ]

    req = request("r", num_prompt_tokens, max_tokens)
    views = pools(reports(WorkerRole.PREFILL, prefills), reports(WorkerRole.DECODE, decodes))
    choice = POLICY.choose(views, req)
    backwards = {role: list(reversed(each)) for role, each in views.items()}
    assert POLICY.choose(backwards, req) == choice
    free = {role: [view.load for view in each if has_credit(view, req, 2.0)] for role, each in views.items()}
    if choice is None:
        assert not all(free.values())
    else:
        assert choice.prefill in free[WorkerRole.PREFILL]
        assert choice.decode in free[WorkerRole.DECODE]
