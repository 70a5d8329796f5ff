"""The load over Baton's own gRPC API, against a scripted server and against a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import Any

import grpc
import pytest

from benchmarks.load import channels
from benchmarks.load.answer import LoadError
from benchmarks.load.driver import Budget, ClosedLoop, Driver, LoadResult
from benchmarks.load.grpc import GrpcTarget, GrpcTransport, fields_of_body
from benchmarks.load.lengths import Fixed
from benchmarks.load.requests import LoadRequest, RandomTokens, RecordedRequests
from benchmarks.load.statistics import first_errors, summarize
from cluster.errors import ConfigError, InvalidRequest, NoCapacity, Overloaded
from cluster.pb import inference_pb2 as pb
from router.gateway.tokenizer import Tokenizer
from tests.benchmarks.fake_inference import FakeInference, Script, serving
from tests.conftest import free_port
from tests.router.gateway.fakes import fake_cluster
from tests.router.gateway.grpc_serving import grpc_target
from tests.router.gateway.tokenizers_in_code import byte_level, write_folder

TOKENS = RandomTokens(Fixed(5), Fixed(4), 352)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("tokenizer"), byte_level()))


async def load(
    target: str, num_requests: int = 1, concurrency: int = 1, requests: Iterator[LoadRequest] | None = None, **how: Any
) -> LoadResult:
    async with GrpcTransport(GrpcTarget(target, **how)) as transport:
        return await Driver(transport, "tiny").run(requests or TOKENS.requests(0), ClosedLoop(concurrency), Budget(num_requests))


async def load_fake(fake: FakeInference, *arguments: Any, **how: Any) -> LoadResult:
    async with serving(fake) as target:
        return await load(target, *arguments, **how)


async def test_messages_say_their_tokens() -> None:
    (trace,) = (await load_fake(FakeInference(Script([(0.0, "ab", 1), (0.02, "abcdef", 1), (0.02, "a", 3)])))).traces
    assert (trace.num_prompt_tokens, trace.num_output_tokens) == (5, 5)
    assert [(chunk.num_chars, chunk.num_tokens) for chunk in trace.chunks] == [(2, 1), (6, 1), (1, 3)]
    first, *others = trace.itls_s
    assert first == trace.gaps_s[0]
    assert others == [pytest.approx(trace.gaps_s[1] / 3)] * 3, "no token is dealt to a longer text"
    assert trace.ended_s == trace.chunks[-1].arrived_s


async def test_a_gateway_s_answers_are_counted_as_it_counts_them(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_target(cluster) as target:
        async with GrpcTransport(GrpcTarget(target)) as transport:
            assert await transport.find_model() == "tiny"
        result = await load(target, 20, 8)
        assert len(result.answered) == 20
        for trace in result.traces:
            assert (trace.num_prompt_tokens, trace.num_output_tokens) == (5, 4)
            assert sum(chunk.num_tokens or 0 for chunk in trace.chunks) == 4
            assert len(trace.itls_s) == 3
            assert trace.chunks[0].num_tokens == 1, "the first token comes straight from prefill"
        asked = cluster.prefill.requests[0]
        assert (asked.sampling.temperature, asked.sampling.ignore_eos, asked.sampling.max_tokens) == (0.0, True, 4)
        prompts = {request.prompt for request in islice(TOKENS.requests(0), 20)}
        assert {tuple(request.prompt_token_ids) for request in cluster.prefill.requests} == prompts


async def test_what_a_gateway_refuses_is_counted_by_status(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_target(cluster) as target:
        result = await load(target, extra=pb.GenerateRequest(top_p=7.0))
        assert "top_p" in first_errors(result)["grpc_INVALID_ARGUMENT"]
        async with GrpcTransport(GrpcTarget(target)) as transport:
            (trace,) = (await Driver(transport, "another").run(TOKENS.requests(0), ClosedLoop(1), Budget(1))).traces
        assert trace.error_kind == "grpc_NOT_FOUND"


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        (Script([], failure=Overloaded("the queue is full")), "grpc_RESOURCE_EXHAUSTED", "the queue is full"),
        (Script(is_finished=False, failure=NoCapacity("worker lost")), "grpc_UNAVAILABLE", "worker lost"),
        (Script([], failure=InvalidRequest("top_p: is wrong")), "grpc_INVALID_ARGUMENT", "top_p"),
        (Script(failure=InvalidRequest("after the finish reason")), "grpc_INVALID_ARGUMENT", "after"),
        (Script(is_finished=False, failure=grpc.StatusCode.UNAVAILABLE), "dropped", "said by the server"),
        (Script(is_finished=False), "unfinished", "without a finish reason"),
    ],
)
async def test_errors_have_kinds(script: Script, kind: str, message: str) -> None:
    await check_one_error(script, kind, message)


async def test_a_late_answer_is_an_error() -> None:
    """The others have as long, and a busy machine may need much of it."""
    await check_one_error(Script([(60.0, "late", 1)]), "timeout", "in time", timeout_s=3.0)


async def check_one_error(script: Script, kind: str, message: str, **how: Any) -> None:
    """Of three requests, the first is answered as in `script`."""
    result = await load_fake(FakeInference(script, Script()), 3, **how)
    summary = summarize(result)
    assert summary.errors == {kind: 1}
    assert message in first_errors(result)[kind]
    assert (summary.num_requests, summary.num_answered, summary.num_output_tokens) == (3, 2, 8)


async def test_nobody_listens() -> None:
    target = f"127.0.0.1:{free_port()}"
    assert summarize(await load(target, 2, 2)).errors == {"connect": 2}
    async with GrpcTransport(GrpcTarget(target)) as transport:
        with pytest.raises(LoadError) as raised:
            await transport.find_model()
    assert raised.value.kind == "connect"


async def test_calls_in_flight_have_connections_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_CHANNELS", 4)
    fake = FakeInference(Script([(0.2, "a", 1)]))
    assert len((await load_fake(fake, 12, 6)).answered) == 12
    assert len(set(fake.peers)) == 4
    one_by_one = FakeInference()
    await load_fake(one_by_one, 3)
    assert len(set(one_by_one.peers)) == 1


async def test_a_cancelled_request_is_cancelled_at_the_server() -> None:
    fake = FakeInference(Script([(0.0, "a", 1), (60.0, "late", 1)]))
    async with serving(fake) as target, GrpcTransport(GrpcTarget(target)) as transport:
        driver = Driver(transport, "tiny")
        run = asyncio.create_task(driver.run(TOKENS.requests(0), ClosedLoop(3), Budget(3)))
        while len(fake.seen) < 3:  # noqa: ASYNC110  # the server has no event for it
            await asyncio.sleep(0.01)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        async with asyncio.timeout(10):
            while fake.num_cancelled < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_messages_sent() -> None:
    fake = FakeInference()
    await load_fake(fake, extra=fields_of_body({"priority": -3, "temperature": 0.5, "stop": "\n", "logit_bias": {"7": 1.5}, "top_k": None}))
    await load_fake(fake, requests=RecordedRequests((LoadRequest("why", 7),)).requests(0), ignore_eos=False)
    tokens, text = fake.seen
    assert tuple(tokens.token_ids.ids) == next(TOKENS.requests(0)).prompt
    assert (tokens.model, tokens.max_tokens, tokens.ignore_eos, tokens.priority, tokens.temperature) == ("tiny", 4, True, -3, 0.5)
    assert list(tokens.stop) == ["\n"]
    assert dict(tokens.logit_bias) == {7: 1.5}
    assert not tokens.HasField("top_k")
    assert (text.text, text.max_tokens, text.temperature) == ("why", 7, 0.0)
    assert not text.HasField("ignore_eos")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stream_options": {}}, "stream_options: GenerateRequest"),
        ({"n": 1}, "n: GenerateRequest"),
        ({"model": "tiny"}, "model: is set by the load, see --model"),
        ({"prompt": "why"}, "prompt: is set by the load, see --dataset"),
        ({"priority": "high"}, "priority: "),
        ({"stop": [1]}, "stop: "),
        ({"max_tokens": -1}, "max_tokens: "),
    ],
)
def test_a_field_that_cannot_be_sent_is_named(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--body: {message}"):
        fields_of_body(body)
