"""The server around the service: health, reflection, its port, and how it stops."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.config import load_config
from cluster.errors import ConfigError
from cluster.pb.inference_pb2_grpc import InferenceStub
from cluster.types import WorkerRole
from router.gateway.app import create_app
from router.gateway.grpc_server import INFERENCE, GrpcServer, GrpcSettings
from router.gateway.tokenizer import Tokenizer
from tests.conftest import free_port
from tests.eventually import eventually
from tests.router.gateway.fake_workers import ANSWER, Act
from tests.router.gateway.fakes import FakeCluster, fake_cluster
from tests.router.gateway.grpc_serving import failure, generate, grpc_target, read_to_end, request, text_in
from tests.router.gateway.serving import text_of

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@asynccontextmanager
async def health_stub(cluster: FakeCluster) -> AsyncIterator[Any]:
    async with grpc_target(cluster) as target, aio.insecure_channel(target) as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def check(stub: Any, service: str = "") -> Any:
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_is_readiness(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, silent=(WorkerRole.DECODE,)) as cluster, health_stub(cluster) as stub:
        assert [await check(stub, name) for name in ("", INFERENCE)] == [NOT_SERVING] * 2
        cluster.decode.is_up = True
        await eventually(lambda: cluster.router.ready().ready)
        assert [await check(stub, name) for name in ("", INFERENCE)] == [SERVING] * 2
        listed = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {name: one.status for name, one in listed.items()} == {"": SERVING, INFERENCE: SERVING}
        with pytest.raises(aio.AioRpcError) as raised:
            await check(stub, "baton.v1.Nothing")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        await cluster.gateway.book.settle()
        cluster.lose_router()
        assert await check(stub) == NOT_SERVING


async def test_a_watcher_hears_of_changes(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.gateway.grpc_health.WATCH_INTERVAL_S", 0.02)
    async with fake_cluster(tokenizer, silent=(WorkerRole.DECODE,)) as cluster, health_stub(cluster) as stub:
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        nothing = stub.Watch(health_pb2.HealthCheckRequest(service="nothing"))
        assert [(await watch.read()).status, (await nothing.read()).status] == [NOT_SERVING, UNKNOWN]
        cluster.decode.is_up = True
        assert (await watch.read()).status == SERVING
        watch.cancel()
        nothing.cancel()


async def test_closing_tells_watchers_and_waits_for_running_calls(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        server = GrpcServer(cluster.gateway, GrpcSettings("127.0.0.1", 0, shares_port=False, drain_s=10.0))
        async with aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
            stub: Any = InferenceStub(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            call = stub.Generate(request(max_tokens=32))
            first = await call.read()
            closing = asyncio.create_task(server.close())
            last: list[Any] = []
            await read_to_end(watch, last)
            assert [answer.status for answer in last] == [NOT_SERVING]
            messages = [first]
            await read_to_end(call, messages)
            assert text_in(messages) == text_of(ANSWER)
            await closing
            assert (await failure(stub.Generate(request(), timeout=5))).code() is grpc.StatusCode.UNAVAILABLE


async def test_closing_cancels_what_does_not_end_in_time(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        server = GrpcServer(cluster.gateway, GrpcSettings("127.0.0.1", 0, shares_port=False, drain_s=0.1))
        async with aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
            stub: Any = InferenceStub(channel)
            cluster.decode.acts.append(Act.SOME_STALL)
            call = stub.Generate(request())
            await call.read()
            await server.close()
            await failure(call)
        await cluster.assert_idle()
        await server.close()


async def test_reflection_lists_and_describes_the_services(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_target(cluster) as target, aio.insecure_channel(target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(**one) for one in ({"list_services": ""}, {"file_containing_symbol": INFERENCE})]
        listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
        names = {service.name for service in listed.list_services_response.service}
        assert names == {"baton.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert b"GenerateRequest" in described.file_descriptor_response.file_descriptor_proto[0]


async def test_the_application_starts_and_stops_it(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        settings = GrpcSettings("127.0.0.1", free_port(), shares_port=False, drain_s=0.0)
        app = create_app(cluster.gateway, GrpcServer(cluster.gateway, settings))
        async with aio.insecure_channel(f"127.0.0.1:{settings.port}") as channel:
            async with app.router.lifespan_context(app):
                stub: Any = InferenceStub(channel)
                assert text_in(await generate(stub)) == text_of(ANSWER[:8])
            assert (await failure(stub.Generate(request(), timeout=5))).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_port_in_use_is_refused_by_name_unless_it_is_shared(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster:
        for shares_port in (False, True):
            first = GrpcServer(cluster.gateway, GrpcSettings("127.0.0.1", 0, shares_port, drain_s=0.0))
            port = await first.start()
            second = GrpcServer(cluster.gateway, GrpcSettings("127.0.0.1", port, shares_port, drain_s=0.0))
            if shares_port:
                assert await second.start() == port
            else:
                with pytest.raises(ConfigError) as raised:
                    await second.start()
                assert raised.value.param == "gateway.grpc_port"
            await second.close()
            await first.close()


def test_settings_come_from_the_config() -> None:
    assert GrpcSettings.of(load_config({"model": "m"})) is None
    alone = GrpcSettings.of(load_config({"model": "m", "gateway": {"grpc_port": 9000}}))
    assert alone == GrpcSettings("127.0.0.1", 9000, shares_port=False, drain_s=30.0)
    several = GrpcSettings.of(load_config({"model": "m", "gateway": {"grpc_port": 9000, "replicas": 2, "grpc_host": "0.0.0.0"}}))
    assert several == GrpcSettings("0.0.0.0", 9000, shares_port=True, drain_s=30.0)


@pytest.mark.parametrize("module", ["grpc_client", "grpc_client_asyncio"])
async def test_the_examples_run(tokenizer: Tokenizer, module: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = importlib.import_module(f"deploy.examples.{module}")
    async with fake_cluster(tokenizer) as cluster, grpc_target(cluster) as target:
        await asyncio.to_thread(example.main, ["The capital", "--target", target, "--max-tokens", "8"])
        said = capsys.readouterr().out
        assert text_of(ANSWER[:8]) in said
        assert "8 tokens" in said
        with pytest.raises(SystemExit, match=r"INVALID_ARGUMENT.*max_tokens"):
            await asyncio.to_thread(example.main, ["The capital", "--target", target, "--max-tokens", "9999"])
        with pytest.raises(SystemExit, match="2"):
            await asyncio.to_thread(example.main, ["The capital", "--target", target, "--max-tokens", "-2"])
        assert "--max-tokens: invalid positive value: '-2'" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["grpc_client", "grpc_client_asyncio"])
async def test_the_examples_say_that_they_wait(module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    example = importlib.import_module(f"deploy.examples.{module}")
    monkeypatch.setattr(example, "PATIENCE_S", 0.1)
    monkeypatch.setattr(example, "TIMEOUT_S", 0.3)
    target = f"127.0.0.1:{free_port()}"
    with pytest.raises(SystemExit, match="DEADLINE_EXCEEDED"):
        await asyncio.to_thread(example.main, ["hello", "--target", target])
    assert f"waiting for a gateway at {target}" in capsys.readouterr().err
