"""The gateway's books, and those of all processes behind one route."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import httpx2

from cluster import wire
from cluster.books import ClusterBooks, ProcessBooks
from cluster.config import RouterConfig
from cluster.types import WorkerRole
from router.gateway.auditor import Auditor
from router.gateway.gather import Source
from router.gateway.tokenizer import Tokenizer
from tests.eventually import eventually
from tests.router.gateway.fake_workers import Act
from tests.router.gateway.fakes import fake_cluster
from tests.router.gateway.serving import CHAT, http_client

ONE, OTHER = ProcessBooks("decode", "one", {}), ProcessBooks("decode", "other", {"calls": 1})


def source(*answers: ProcessBooks | bytes | BaseException) -> Source[bytes]:
    async def books() -> Sequence[bytes | BaseException]:
        return [wire.encode(answer) if isinstance(answer, ProcessBooks) else answer for answer in answers]

    return books


async def stuck() -> Sequence[bytes | BaseException]:
    await asyncio.Event().wait()
    return []


async def test_all_that_answer_are_heard_and_the_others_are_missing() -> None:
    sources = {
        "Decode": source(ONE, RuntimeError("dead"), OTHER),
        "Gateway": source(),
        "Prefill": stuck,
        "Router": source(b"no books"),
    }
    found = await Auditor(sources, timeout_s=0.05).books()
    assert found.processes == (ONE, OTHER)
    assert found.missing["Decode"] == "1 of 3 did not answer: RuntimeError: dead"
    assert found.missing["Gateway"] == "no replica is running"
    assert found.missing["Prefill"] == "1 of 1 did not answer: TimeoutError"
    assert found.missing["Router"].startswith("not a ProcessBooks: ")


async def test_a_running_request_is_held_and_listed(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        cluster.prefill.acts.append(Act.OFFER_STALL)
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await cluster.prefill.stalled.wait()
        books = cluster.gateway.books()
        assert (books.kind, books.name, books.faults) == ("gateway", cluster.gateway.book.gateway_id, ())
        assert books.held == {"requests": 1, "placements": 1, "worker_calls": 1, "router_calls": 0}
        assert books.requests == tuple(key.rpartition("/")[0] for key in cluster.prefill.live)
        asking.cancel()
        await eventually(lambda: not any(cluster.gateway.books().held.values()))
        assert cluster.gateway.books().requests == ()


async def test_a_request_in_the_router_s_queue_is_listed_too(tokenizer: Tokenizer) -> None:
    settings = RouterConfig(recovery_s=0.0, capacity_wait_s=60.0)
    async with fake_cluster(tokenizer, router=settings, silent=(WorkerRole.DECODE,)) as cluster, http_client(cluster) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await eventually(lambda: len(cluster.router.queue) == 1)
        books = cluster.gateway.books()
        assert books.requests == cluster.router.books().requests
        assert len(books.requests) == 1
        assert books.held["placements"] == 0
        asking.cancel()
        await eventually(lambda: cluster.gateway.books().requests == ())


async def test_a_placement_of_another_request_is_a_fault(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        cluster.prefill.acts.append(Act.OFFER_STALL)
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await cluster.prefill.stalled.wait()
        [(request_id, entry)] = cluster.gateway.book._live.items()
        cluster.gateway.book._live[request_id] = replace(entry, placement=replace(entry.placement, request_id="another"))
        [fault] = cluster.gateway.books().faults
        assert "another" in fault and request_id in fault
        asking.cancel()


async def test_the_route_tells_every_process(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        found = _books(await client.get("/v1/cluster/books"))
        assert {process.kind for process in found.processes} == {"gateway", "router"}
        assert found.missing == {}
        await cluster.gateway.book.settle()
        cluster.lose_router()
        found = _books(await client.get("/v1/cluster/books"))
        assert [process.kind for process in found.processes] == ["gateway"]
        assert found.missing == {"Router": "1 of 1 did not answer: RuntimeError: the router is gone"}


def _books(response: httpx2.Response) -> ClusterBooks:
    assert response.status_code == 200
    return wire.validated(ClusterBooks, response.json())
