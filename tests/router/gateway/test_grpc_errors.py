"""What ends a gRPC call early: a status of the table, and nothing is left anywhere."""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import Any

import grpc
import pytest
from grpc import aio

from cluster.config import GatewayConfig, RouterConfig
from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub
from cluster.types import WorkerRole
from deploy.examples.grpc_client_asyncio import retrying_channel
from router.gateway.gateway import Gateway
from router.gateway.grpc_service import REQUEST_ID_KEY
from router.gateway.tokenizer import Tokenizer
from tests.eventually import eventually
from tests.router.gateway.fake_workers import ANSWER, Act
from tests.router.gateway.fakes import fake_cluster
from tests.router.gateway.grpc_serving import failure, generate, grpc_stub, grpc_target, read_to_end, request, text_in, trailing
from tests.router.gateway.serving import text_of

CODE = grpc.StatusCode

BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**32 - 1}, "max_tokens"),
    ({"max_tokens": 256}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"temperature": -0.5}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": math.inf}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop_token_ids": [352]}, "stop_token_ids"),
    ({"logit_bias": {352: 1.0}}, "logit_bias"),
    ({"logit_bias": {5: 101.0}}, "logit_bias.5"),
    ({"logprobs": 21}, "logprobs"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"text": ""}, "prompt"),
    ({"text": "long " * 300}, "prompt"),
    ({"token_ids": pb.TokenIds()}, "prompt"),
    ({"token_ids": pb.TokenIds(ids=[352])}, "prompt"),
    ({"model": ""}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=str)
async def test_bad_input_names_the_field(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        error = await failure(stub.Generate(request(**fields), timeout=20))
        assert error.code() is CODE.INVALID_ARGUMENT, error.details()
        assert trailing(error)["baton-error-param"] == param.replace("[", "%5B").replace("]", "%5D")
        assert trailing(error)["baton-error-code"] in ("invalid_request", "context_length_exceeded")
        assert cluster.prefill.requests == []


async def test_no_prompt(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        error = await failure(stub.Generate(pb.GenerateRequest(model="tiny")))
        assert (error.code(), trailing(error)["baton-error-param"]) == (CODE.INVALID_ARGUMENT, "prompt")


async def test_another_model(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        error = await failure(stub.Generate(request(model="other")))
        assert (error.code(), trailing(error)["baton-error-code"]) == (CODE.NOT_FOUND, "model_not_found")
        assert cluster.outcomes() == {"model_not_found": 1}


async def test_a_large_request(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, gateway=GatewayConfig(max_body_bytes=10_000)) as cluster, grpc_stub(cluster) as stub:
        error = await failure(stub.Generate(request(text="x" * 10_001)))
        assert (error.code(), trailing(error)["baton-error-code"]) == (CODE.INVALID_ARGUMENT, "body_too_large")
        huge = await failure(stub.Generate(request(text="x" * 200_000)))
        assert huge.code() is CODE.RESOURCE_EXHAUSTED, "gRPC's own limit keeps memory bounded"


async def test_a_full_queue_says_when_to_come_again(tokenizer: Tokenizer) -> None:
    router = RouterConfig(recovery_s=0.0, capacity_wait_s=10.0, max_queued_requests=1)
    async with fake_cluster(tokenizer, router=router, silent=(WorkerRole.DECODE,)) as cluster, grpc_stub(cluster) as stub:
        waiting = stub.Generate(request())
        await eventually(lambda: len(cluster.router.queue) == 1)
        error = await failure(stub.Generate(request()))
        assert (error.code(), trailing(error)["baton-error-code"]) == (CODE.RESOURCE_EXHAUSTED, "overloaded")
        assert float(trailing(error)["baton-error-retry-after-s"]) > 0
        waiting.cancel()


async def test_a_retry_policy_covers_all_before_the_first_message(tokenizer: Tokenizer) -> None:
    """gRPC's own, as the example clients have it: nothing that Baton sends early may commit the call."""
    gateway = GatewayConfig(max_attempts=1)
    async with fake_cluster(tokenizer, gateway=gateway) as cluster, grpc_target(cluster) as target, retrying_channel(target) as channel:
        stub: Any = InferenceStub(channel)
        cluster.prefill.acts.extend([Act.FAIL, Act.OFFER_FAIL])
        assert text_in(await generate(stub)) == text_of(ANSWER[:8])
        assert cluster.outcomes() == {"no_capacity": 2, "length": 1}
        cluster.decode.acts.append(Act.SOME_FAIL)
        assert (await failure(stub.Generate(request()))).code() is CODE.UNAVAILABLE, "what has begun is not repeated"


async def test_no_capacity(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, silent=(WorkerRole.DECODE,)) as cluster, grpc_stub(cluster) as stub:
        assert (await failure(stub.Generate(request()))).code() is CODE.UNAVAILABLE


@pytest.mark.parametrize(("act", "code"), [(Act.SOME_FAIL, CODE.UNAVAILABLE), (Act.ABORT, CODE.INTERNAL), (Act.BUG, CODE.INTERNAL)])
async def test_a_failure_after_the_first_message_is_the_status(tokenizer: Tokenizer, act: Act, code: grpc.StatusCode) -> None:
    gateway = GatewayConfig(failure_policy="fail")
    async with fake_cluster(tokenizer, gateway=gateway) as cluster, grpc_stub(cluster) as stub:
        cluster.decode.acts.append(act)
        call = stub.Generate(request())
        messages = [await call.read()]
        with pytest.raises(aio.AioRpcError) as raised:
            await read_to_end(call, messages)
        assert raised.value.code() is code
        assert text_of(ANSWER[:8]).startswith(text_in(messages))
        assert not any(message.finish_reason for message in messages), "no fake finish"


async def test_a_bug_is_internal_and_logged(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(Gateway, "generate", broken)
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        error = await failure(stub.Generate(request()))
        assert error.code() is CODE.INTERNAL
        assert "secret" not in str(error.details())
        assert "bug in the gateway" in caplog.text
        assert cluster.outcomes() == {"internal_error": 1}


@pytest.mark.parametrize("act", [Act.STALL, Act.OFFER_STALL], ids=str)
async def test_the_deadline_in_prefill(tokenizer: Tokenizer, act: Act) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        cluster.prefill.acts.append(act)
        started_s = time.monotonic()
        error = await failure(stub.Generate(request(), timeout=0.2))
        assert error.code() is CODE.DEADLINE_EXCEEDED
        assert time.monotonic() - started_s < 2
        await cluster.assert_idle()
        assert cluster.outcomes() == {"deadline_exceeded": 1}


@pytest.mark.parametrize("act", [Act.STALL, Act.TAKEN_STALL, Act.SOME_STALL], ids=str)
async def test_the_deadline_in_decode(tokenizer: Tokenizer, act: Act) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        cluster.decode.acts.append(act)
        assert (await failure(stub.Generate(request(), timeout=0.3))).code() is CODE.DEADLINE_EXCEEDED
        await cluster.assert_idle()
        assert cluster.outcomes() == {"deadline_exceeded": 1}


async def test_the_configured_deadline_holds_without_the_client_s(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, gateway=GatewayConfig(request_timeout_s=0.2)) as cluster, grpc_stub(cluster) as stub:
        cluster.prefill.acts.append(Act.STALL)
        error = await failure(stub.Generate(request()))
        assert (error.code(), trailing(error)["baton-error-code"]) == (CODE.DEADLINE_EXCEEDED, "deadline_exceeded")


async def test_a_deadline_in_the_queue(tokenizer: Tokenizer) -> None:
    router = RouterConfig(recovery_s=0.0, capacity_wait_s=10.0)
    async with fake_cluster(tokenizer, router=router, silent=(WorkerRole.DECODE,)) as cluster, grpc_stub(cluster) as stub:
        assert (await failure(stub.Generate(request(), timeout=0.2))).code() is CODE.DEADLINE_EXCEEDED
        await cluster.assert_idle()


async def test_a_cancel_exactly_on_a_message_frees_everything(tokenizer: Tokenizer) -> None:
    """The race that Serve's gRPC proxy loses: the cancel lands while the next message is being sent, and then nothing more happens."""
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        cluster.decode.batch = 1
        for round_number in range(60):
            if round_number % 2:
                cluster.decode.acts.append(Act.SOME_STALL)  # after its first message: from then on nothing but the cancel can end it
            call = stub.Generate(request(max_tokens=32))
            for _ in range(2 if round_number % 2 else round_number % 20 + 1):
                await call.read()
            call.cancel()
            await cluster.assert_idle()
        assert set(cluster.outcomes()) <= {"client_gone", "length"}, "a fast worker may be done before the cancel comes"
        assert cluster.outcomes()["client_gone"] >= 30


async def test_cancels_at_random_moments(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:

        async def one(delay_s: float) -> None:
            call = stub.Generate(request(max_tokens=32))
            reading = asyncio.create_task(failure(call))
            await asyncio.sleep(delay_s)
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        for _ in range(10):
            await asyncio.gather(*(one(rng.uniform(0, 0.05)) for _ in range(10)))
        await cluster.assert_idle()
        assert set(cluster.outcomes()) <= {"client_gone", "length"}


async def test_a_channel_that_is_closed_frees_everything(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_target(cluster) as target:
        async with aio.insecure_channel(target) as channel:
            stub: Any = InferenceStub(channel)
            cluster.decode.acts.append(Act.SOME_STALL)
            call = stub.Generate(request())
            await call.read()
            await cluster.decode.stalled.wait()
        await cluster.assert_idle()
        assert cluster.outcomes() == {"client_gone": 1}


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
async def test_abort_ends_the_call_with_cancelled(tokenizer: Tokenizer, stage: str) -> None:
    router = RouterConfig(recovery_s=0.0, capacity_wait_s=10.0)
    silent = (WorkerRole.DECODE,) if stage == "queue" else ()
    async with fake_cluster(tokenizer, router=router, silent=silent) as cluster, grpc_stub(cluster) as stub:
        if stage != "queue":
            worker = cluster.prefill if stage == "prefill" else cluster.decode
            worker.acts.append(Act.OFFER_STALL if stage == "prefill" else Act.SOME_STALL)
        request_id = "named by the client"
        call = stub.Generate(request(), metadata=((REQUEST_ID_KEY, request_id),))
        reading = asyncio.create_task(failure(call))
        await (eventually(lambda: len(cluster.router.queue) == 1) if stage == "queue" else worker.stalled.wait())
        answers = await asyncio.gather(*(stub.Abort(pb.AbortRequest(request_id=request_id)) for _ in range(3)))
        assert sorted(answer.aborted for answer in answers) == [False, False, True], "one of them did it"
        error = await reading
        assert (error.code(), error.details()) == (CODE.CANCELLED, "the request was aborted")
        await cluster.assert_idle()
        assert cluster.outcomes() == {"client_gone": 1}
        assert not (await stub.Abort(pb.AbortRequest(request_id=request_id))).aborted, "it is over"


async def test_abort_disturbs_nobody_else(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        assert not (await stub.Abort(pb.AbortRequest(request_id="nobody's"))).aborted
        assert not (await stub.Abort(pb.AbortRequest())).aborted
        assert text_in(await generate(stub)) == text_of(ANSWER[:8])
