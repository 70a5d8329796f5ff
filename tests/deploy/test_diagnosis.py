"""Each thing that can be off is found, in words that name it; what is right is not, and what moves is not taken for a leak."""

from __future__ import annotations

import pytest

from cluster.books import ClusterBooks
from deploy.diagnosis import Trouble, diagnose
from tests.deploy.books_of import cluster, process

RUNNING = (process("gateway", requests=("r",)), process("router", requests=("r",)))


def test_four_processes_with_nothing_are_idle() -> None:
    found = diagnose(cluster())
    assert found.is_idle
    assert str(found) == "balanced: idle"


def test_what_is_held_for_requests_that_run_is_right() -> None:
    found = diagnose(cluster(*RUNNING, process("decode", held={"blocks_owned": 9}, requests=("r",))))
    assert found.is_balanced and not found.is_idle
    assert str(found) == "balanced: 1 request running"


def test_a_call_that_has_no_request_yet_is_running() -> None:
    found = diagnose(cluster(process("gateway", held={"requests": 2})))
    assert str(found) == "balanced: 2 requests running"


def test_two_prefill_workers_have_a_pool_each() -> None:
    books = cluster(process("decode", segments={"baton-kv:7": 1, "baton-kv:8": 1}, peers=("prefill-life", "other-life")))
    other = process("prefill", name="other-life", process="host-other", segments={"baton-kv:8": 1})
    assert diagnose(ClusterBooks((*books.processes, other))).is_idle


def test_one_worker_that_does_both_has_no_pool_in_shared_memory() -> None:
    alone = process("colocated", segments={})
    assert diagnose(cluster(alone, without=("prefill", "decode"))).is_idle


OFF: dict[str, tuple[ClusterBooks, Trouble, str]] = {
    "no answer": (cluster(missing={"Decode": "no replica is running"}), Trouble.MISSING, "Decode is missing: no replica is running"),
    "a fault": (
        cluster(process("decode", faults=("block 7 has 1 references and 0 holders",))),
        Trouble.FAULT,
        "decode host-decode is at fault: block 7 has 1 references and 0 holders",
    ),
    "a fault while requests run": (
        cluster(*RUNNING, process("prefill", faults=("x",))),
        Trouble.FAULT,
        "prefill host-prefill is at fault: x",
    ),
    "held when idle": (
        cluster(process("prefill", held={"blocks_leased": 3})),
        Trouble.HELD,
        "prefill host-prefill holds blocks_leased 3 and no request is running",
    ),
    "an orphan": (
        cluster(*RUNNING, process("decode", requests=("r", "q"))),
        Trouble.ORPHAN,
        "decode host-decode works on request q, which neither gateway nor router knows",
    ),
    "an unlisted placement": (
        cluster(RUNNING[0], process("router", requests=("r", "q"))),
        Trouble.UNLISTED,
        "router host-router holds request q, which no gateway knows",
    ),
    "a forgotten placement": (
        cluster(RUNNING[1], process("gateway", requests=("r", "q"))),
        Trouble.FORGOTTEN,
        "gateway host-gateway holds request q, which the router does not know",
    ),
    "a pool of a dead worker": (
        cluster(process("decode", segments={"baton-kv:7": 1, "baton-kv:6": 512 * 2**20})),
        Trouble.SEGMENT,
        "decode host-decode maps 512 MiB of a KV pool that no prefill worker has",
    ),
    "two pools of one worker": (
        cluster(process("prefill", segments={"baton-kv:7": 1, "baton-kv:8": 1})),
        Trouble.SEGMENT,
        "prefill host-prefill maps 2 KV pools, it has one",
    ),
    "a dead peer": (
        cluster(process("decode", peers=("prefill-life", "dead-life"))),
        Trouble.PEER,
        "decode host-decode still has the prefill worker dead-life as a peer, which is no more",
    ),
    "a memfd kept by the reader": (
        cluster(process("decode", open_files={"memfd:baton-kv": 2})),
        Trouble.MEMFD,
        "decode host-decode has 2 descriptors of KV pools open, 1 are expected",
    ),
    "one too many of the owner": (
        cluster(process("prefill", open_files={"memfd:baton-kv": 3})),
        Trouble.MEMFD,
        "prefill host-prefill has 3 descriptors of KV pools open, 2 are expected",
    ),
    "files near the limit": (
        cluster(process("gateway", open_files={"socket": 900})),
        Trouble.FILES,
        "gateway host-gateway has 900 files open, the limit is 1024",
    ),
}


@pytest.mark.parametrize(("books", "trouble", "text"), OFF.values(), ids=OFF.keys())
def test_what_is_off_is_found_and_named(books: ClusterBooks, trouble: Trouble, text: str) -> None:
    for found in (diagnose(books), diagnose(books, earlier=books)):
        assert [(finding.trouble, str(finding)) for finding in found.findings] == [(trouble, text)]
        assert not found.is_balanced and not found.is_idle
        assert str(found) == f"off:\n  {text}"


@pytest.mark.parametrize(("books", "trouble", "_text"), OFF.values(), ids=OFF.keys())
def test_what_was_not_off_before_is_not_said(books: ClusterBooks, trouble: Trouble, _text: str) -> None:
    found = diagnose(books, earlier=cluster())
    assert found.is_balanced
    assert not found.is_idle, "it is not well either"


def test_what_a_worker_in_a_long_step_holds_is_neither_a_leak_nor_idle() -> None:
    """Its requests were cancelled meanwhile: it hears of that after the step."""
    busy = process("decode", held={"blocks_owned": 9}, requests=("q",), is_busy=True)
    for books in (cluster(busy), cluster(process("decode", is_busy=True))):
        for found in (diagnose(books), diagnose(books, earlier=books)):
            assert found.is_balanced and not found.is_idle
    running = cluster(*RUNNING, busy)
    assert str(diagnose(running, earlier=running)) == "balanced: 1 request running"


def test_another_request_is_another_orphan() -> None:
    one, other = (cluster(*RUNNING, process("decode", requests=(name,))) for name in "qp")
    assert diagnose(other, earlier=one).is_balanced


def test_more_of_the_same_is_the_same() -> None:
    one, other = (cluster(process("decode", held={"blocks_owned": number})) for number in (3, 2))
    assert "blocks_owned 2" in str(diagnose(other, earlier=one))


def test_no_request_is_called_an_orphan_while_its_owner_may_be_silent() -> None:
    for silent in ("Gateway", "Router"):
        found = diagnose(cluster(process("decode", requests=("q",)), missing={silent: "timeout"}, without=(silent.lower(),)))
        assert {finding.trouble for finding in found.findings} == {Trouble.MISSING}


def test_no_pool_is_called_leaked_while_its_owner_may_be_silent() -> None:
    found = diagnose(cluster(missing={"Prefill": "timeout"}, without=("prefill",)))
    assert {finding.trouble for finding in found.findings} == {Trouble.MISSING}


def test_residue_of_the_last_request_is_neither_a_leak_nor_idle() -> None:
    found = diagnose(cluster(process("decode", held={"calls": 1})), earlier=cluster(*RUNNING))
    assert found.is_balanced and not found.is_idle
    assert str(found) == "balanced: the last request has just ended"
