"""Client and service over bytes: values and errors arrive as what they were."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import errors
from cluster.config import BatonConfig
from cluster.errors import BatonError, ContextTooLong, InternalError, InvalidRequest, NoCapacity, Overloaded, StaleEpoch
from cluster.types import AdmitRequest, ReportReply, WorkerRole
from cluster.wire import WireError, decode, encode
from router.control.client import RouterClient
from router.control.deployment import RouterReplica, expected_workers
from router.control.messages import LiveRequest, Phase, Redirect, seal, seal_error, unseal
from router.control.service import RouterService
from tests.router.control.builders import Cluster, load, prefill_load, request, settle


def connected(**config: Any) -> tuple[Cluster, RouterClient]:
    cluster = Cluster(**config)
    cluster.report(prefill_load(), load("d"))

    async def call(method: str, payload: bytes) -> bytes:
        return await RouterService(cluster.router).call(method, payload)

    return cluster, RouterClient(call)


def all_errors(root: type[BatonError] = BatonError) -> list[type[BatonError]]:
    return [root, *(found for child in root.__subclasses__() for found in all_errors(child))]


@pytest.mark.parametrize(
    "cls", [cls for cls in all_errors() if errors.from_code(cls.code, "").__class__ is cls], ids=lambda cls: cls.__name__
)
def test_every_error_keeps_its_class_and_fields(cls: type[BatonError]) -> None:
    with pytest.raises(cls) as caught:
        unseal(seal_error(cls("why", param="p", retry_after_s=2.5)))
    assert type(caught.value) is cls
    assert (caught.value.message, caught.value.param, caught.value.retry_after_s) == ("why", "p", 2.5)


@given(st.binary())
def test_values_pass_unchanged(value: bytes) -> None:
    assert unseal(seal(value)) == value


@given(st.binary(max_size=64))
def test_noise_is_not_an_envelope(noise: bytes) -> None:
    with contextlib.suppress(WireError, BatonError):
        assert isinstance(unseal(noise), bytes)


async def test_the_life_of_a_request() -> None:
    cluster, client = connected()
    cluster.report(load("e"))
    placement = await client.admit(request("r", exclude=("x",), timeout_s=3.0))
    assert placement == cluster.router.live.get("r").placement  # type: ignore[union-attr]
    await client.prefill_done("r")
    moved = await client.redirect(Redirect("r", placement.decode.incarnation, 0.1))
    assert moved.decode != placement.decode
    assert await client.heartbeat("g", [LiveRequest(request("r"), moved, Phase.DECODE)]) == 1
    assert (await client.snapshot())["live_placements"] == {"prefill": 0, "decode": 1}
    assert (await client.ready()).ready
    await client.finish("r")
    assert len(cluster.router.live) == 0


async def test_heartbeat_sends_what_a_new_router_does_not_know() -> None:
    cluster, client = connected()
    live = [LiveRequest(request(name), await client.admit(request(name)), Phase.PREFILL) for name in ("a", "b")]
    cluster.router = cluster.new_router(epoch=2)
    cluster.report(prefill_load(), load("d"))
    assert await client.heartbeat("g", live) == 2
    assert sorted(entry.request_id for entry in cluster.router.live) == ["a", "b"]


async def test_errors_of_the_router_arrive_typed() -> None:
    cluster, client = connected(max_queued_requests=1)
    with pytest.raises(ContextTooLong) as too_long:
        await client.admit(request("r", 5000))
    assert too_long.value.param == "prompt"
    with pytest.raises(StaleEpoch):
        await client.redirect(Redirect("nobody", "d#1", 0.0))
    cluster.report(load("d", num_seqs_running=8))
    held = asyncio.create_task(client.admit(request("held")))
    await settle()
    with pytest.raises(Overloaded) as overloaded:
        await client.admit(request("more"))
    assert overloaded.value.retry_after_s == 1.0
    held.cancel()
    await settle()
    assert len(cluster.router.queue) == 0


async def test_unknown_calls_and_broken_payloads_are_answered() -> None:
    cluster, _ = connected()
    service = RouterService(cluster.router)
    with pytest.raises(InvalidRequest):
        unseal(await service.call("no_such_call", b""))
    with pytest.raises(InternalError, match="AdmitRequest"):
        unseal(await service.call("admit", b"\xc1"))
    with pytest.raises(WireError):
        service.report(encode(request("r")))


async def test_a_bug_of_the_router_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, client = connected()
    monkeypatch.setattr(cluster.router, "finish", lambda _name: 1 / 0)
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        await client.finish("r")


async def test_an_answer_that_is_no_envelope() -> None:
    async def call(_method: str, _payload: bytes) -> bytes:
        return b"\xc1"

    with pytest.raises(InternalError):
        await RouterClient(call).finish("r")


def test_expected_workers_follow_the_mode() -> None:
    config = BatonConfig(model="m")
    assert expected_workers(config) == {WorkerRole.PREFILL: 1, WorkerRole.DECODE: 1}
    assert expected_workers(config.model_copy(update={"mode": "colocated"})) == {WorkerRole.COLOCATED: 1}


async def test_the_replica_serves_reports_calls_and_metrics() -> None:
    replica = RouterReplica(BatonConfig(model="m"))
    client = RouterClient(replica.call)
    for report in (prefill_load(), load("d")):
        assert decode(ReportReply, await replica.report(encode(report))).router_epoch > 1_700_000_000_000
    await client.admit(request("r"))
    await replica.check_health()
    text = await replica.metrics_text()
    assert 'baton_router_live_placements{phase="prefill"} 1.0' in text
    assert "baton_router_placements_total 1.0" in text
    replica._sweeper.cancel()
    await settle()
    with pytest.raises(RuntimeError):
        await replica.check_health()


def restarting(cluster: Cluster, num_failures: int) -> tuple[RouterClient, list[str]]:
    """A client whose first calls find no router."""
    calls: list[str] = []

    async def call(method: str, payload: bytes) -> bytes:
        calls.append(method)
        if len(calls) <= num_failures:
            raise NoCapacity("the router cannot be reached")
        return await RouterService(cluster.router).call(method, payload)

    return RouterClient(call, patience_s=5.0), calls


async def test_a_router_that_restarts_is_called_again() -> None:
    cluster, _ = connected()
    client, calls = restarting(cluster, 3)
    await client.finish("r")
    assert calls == ["finish"] * 4


async def test_a_request_keeps_its_place_when_the_router_restarts() -> None:
    cluster, _ = connected()
    client, _ = restarting(cluster, 2)
    placement = await client.admit(request("r"))
    [waiting] = cluster.admit(request("later"))
    await settle()
    at_once = waiting.result().order_key.virtual_deadline_s
    assert placement.order_key.virtual_deadline_s <= at_once - 2 * 0.05  # as if it had come when it was first submitted


async def test_a_request_that_waited_is_not_bounded_again() -> None:
    """It was admitted by the router's earlier life."""
    cluster = Cluster(max_queued_requests=1)
    cluster.admit(request("first"))
    refused, waited = cluster.admit(request("new"), request("old", waited_s=1.0))
    await settle()
    assert isinstance(refused.exception(), Overloaded)
    assert not waited.done()


async def test_a_gateway_that_was_taken_for_dead_submits_its_requests_again() -> None:
    """It was stopped for a while, and lives."""
    cluster, _ = connected()
    placement = await cluster.place(request("r"))
    waited_s: list[float] = []

    async def call(_method: str, payload: bytes) -> bytes:
        waited_s.append(decode(AdmitRequest, payload).waited_s)
        await asyncio.sleep(0.01)
        return seal_error(StaleEpoch("not heard of")) if len(waited_s) == 1 else seal(encode(placement))

    assert await RouterClient(call).admit(request("r")) == placement
    assert waited_s[0] == 0.0 < waited_s[1], "its place in the queue is that of the first time"


async def test_patience_ends() -> None:
    async def call(_method: str, _payload: bytes) -> bytes:
        raise NoCapacity("the router cannot be reached")

    with pytest.raises(NoCapacity):
        await RouterClient(call, patience_s=0.1).finish("r")


async def test_what_the_router_refuses_is_not_repeated() -> None:
    calls: list[str] = []

    async def call(method: str, _payload: bytes) -> bytes:
        calls.append(method)
        return seal_error(NoCapacity("no worker"))

    with pytest.raises(NoCapacity, match="no worker"):
        await RouterClient(call, patience_s=5.0).finish("r")
    assert calls == ["finish"]
