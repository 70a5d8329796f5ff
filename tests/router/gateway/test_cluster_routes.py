"""The routes for those who run the cluster, and the list of models."""

from __future__ import annotations

import pytest

from cluster.types import WorkerRole
from router.gateway import gateway
from router.gateway.tokenizer import Tokenizer
from tests.eventually import eventually
from tests.router.gateway.fakes import fake_cluster
from tests.router.gateway.serving import CHAT, error_of, http_client


async def test_models(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["tiny"]
        assert (await client.get("/v1/models/tiny")).json() == listed["data"][0]
        assert error_of(await client.get("/v1/models/a/b"), 404)["code"] == "model_not_found"


async def test_alive_is_not_ready(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, silent=(WorkerRole.DECODE,)) as cluster, http_client(cluster) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert "decode" in error_of(await client.get("/ready"), 503)["message"]
        cluster.decode.is_up = True
        await eventually(lambda: cluster.router.ready().ready)
        assert (await client.get("/ready")).status_code == 200


async def test_cluster_and_metrics(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        books = (await client.get("/v1/cluster")).json()
        assert books["model"]["max_model_len"] == 256
        assert books["ready"] is True
        response = await client.get("/metrics")
        assert response.text == "baton_up 1\n"
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_a_router_that_is_gone_is_no_capacity(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        await cluster.gateway.book.settle()
        cluster.lose_router()
        error_of(await client.get("/ready"), 503)
        error_of(await client.get("/v1/cluster"), 503)
        error_of(await client.post("/v1/chat/completions", json=CHAT), 503)
        await cluster.gateway.book.settle()


async def test_a_router_that_hangs_is_no_capacity(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "ROUTER_TIMEOUT_S", 0.05)
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        await cluster.gateway.book.settle()
        cluster.hang_router()
        for path in ("/ready", "/v1/cluster"):
            assert error_of(await client.get(path), 503)["message"] == "the router does not answer: timeout"
