"""Processes that stop for a while, and clients that stop reading: all others go on, memory stays bounded, and all is well afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from typing import Any, Final

import httpx2
import pytest
from grpc import aio

from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub
from tests.integration.faults.asking import Asking, answers_of
from tests.integration.faults.clients import Way, connected
from tests.integration.faults.fault_report import FaultReport
from tests.integration.faults.fault_run import FaultRun, Load
from tests.integration.faults.processes import bounded_memory, processes
from tests.integration.faults.questions import MODEL, draw_questions
from tests.integration.served import Served, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.asyncio(loop_scope="function")]

STOP_S: Final = 20.0
UNREAD_S: Final = 30.0
KV_BYTES: Final = 64 * 2**20
GROWTH_BYTES: Final = KV_BYTES + 32 * 2**20  # a pool's memory comes with the first touch of its blocks


@pytest.fixture(scope="module")
def pairs(serve_url: str) -> Iterator[Served]:
    """Two processes of each kind but the router."""
    pool = {"kv_cache_bytes": KV_BYTES, "replicas": 2}
    with serving(serve_url, "stops", prefill=pool, decode=pool, gateway={"replicas": 2}) as served:
        yield served


@pytest.mark.parametrize("kind", ["Gateway", "Decode", "Prefill"])
async def test_a_process_that_stops_and_goes_on(pairs: Served, kind: str) -> None:
    """Requests that it holds wait, or start again elsewhere; a stream that it carries may end with an error. Nobody kills it for that."""
    await pairs.await_ready()
    rng = random.Random(kind)
    questions = draw_questions(rng, 12)
    before = processes(pairs)
    async with connected(pairs, retries=True) as clients:
        answers = await answers_of(clients, questions)
        run = FaultRun(pairs, clients, questions, rng, stop_s=STOP_S)
        async with bounded_memory(pairs, GROWTH_BYTES):
            await run.run(Load(num_requests=48, num_in_flight=8, ways=list(Way)), [kind])
        report = FaultReport(run, answers)
        print(report)
        assert not report.complaints(), "\n".join([*report.complaints(), str(report)])
        await pairs.await_ready()
        assert await answers_of(clients, questions[:3]) == {question: answers[question] for question in questions[:3]}
    assert set(processes(pairs)) == set(before), "none was taken for dead and replaced"
    await pairs.await_balance()


LONG: Final[dict[str, Any]] = {"model": MODEL, "max_tokens": 400, "seed": 1, "logprobs": 5}
LONG_PROMPT: Final = "Once upon a time, in a lighthouse,"


class SilentHttpReader:
    """A socket with a small receive buffer."""

    async def ask(self, served: Served) -> None:
        url = httpx2.URL(served.url)
        body = json.dumps({**LONG, "prompt": LONG_PROMPT, "temperature": 0, "ignore_eos": True, "stream": True}).encode()
        head = f"POST {url.path}/v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, (url.host, url.port))
        await loop.sock_sendall(self._socket, head.encode() + body)

    async def read(self) -> str:
        """All that was sent to it."""
        received = bytearray()
        while data := await asyncio.get_running_loop().sock_recv(self._socket, 2**16):
            received += data
        self._socket.close()
        events = [line.removeprefix("data: ") for line in received.decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


class SilentGrpcReader:
    """A call of which no message is asked for."""

    async def ask(self, served: Served) -> None:
        self._channel = aio.insecure_channel(served.grpc_target)
        stub: Any = InferenceStub(self._channel)
        self._call = stub.Generate(pb.GenerateRequest(**LONG, text=LONG_PROMPT, temperature=0.0, ignore_eos=True))

    async def read(self) -> str:
        """All that was sent to it."""
        text = "".join([message.text async for message in self._call])
        await self._channel.close(None)
        return text


@pytest.mark.parametrize("silent", [SilentHttpReader, SilentGrpcReader])
async def test_a_client_that_does_not_read(pairs: Served, silent: type[SilentHttpReader] | type[SilentGrpcReader]) -> None:
    """It delays nobody, is waited for, and then has its whole answer."""
    await pairs.await_ready()
    rng = random.Random(7)
    questions = draw_questions(rng, 8)
    reader = silent()
    async with connected(pairs) as clients:
        answers = await answers_of(clients, questions)
        async with bounded_memory(pairs, GROWTH_BYTES):
            await reader.ask(pairs)
            deadline_s = asyncio.get_running_loop().time() + UNREAD_S
            while asyncio.get_running_loop().time() < deadline_s:
                for question in questions:
                    asking = Asking(question, rng.choice(list(Way)))
                    await asking.run(clients)
                    assert asking.answer == answers[question], asking.failure
            text = await asyncio.wait_for(reader.read(), 120)
    prompt = {**LONG, "prompt": LONG_PROMPT, "temperature": 0, "extra_body": {"ignore_eos": True}}
    async with pairs.client() as client:
        assert text == (await client.completions.create(**prompt)).choices[0].text
    await pairs.await_balance()
