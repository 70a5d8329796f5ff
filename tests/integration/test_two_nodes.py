"""Prefill on one node and decode on another, each with its own network, so that KV crosses by sockets alone; then one of them is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import rpc
from cluster.config import PoolConfig, RouterConfig
from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub
from tests.harness import Workers, make_request, random_prompt
from tests.integration.served import CLOSE_S, Served
from tests.kv_transfer.planes import NEEDS_NIXL
from tests.nodes.network import why_impossible
from tests.nodes.ray_nodes import POOLS, RayNodes
from tests.tiny_models import tiny_model

_WHY_NOT = why_impossible()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(_WHY_NOT is not None, reason=f"no nodes of their own: {_WHY_NOT}")]

POOL: dict[str, Any] = {"scheme": "bf16", "kv_dtype": "bf16", "block_size": 16, "kv_cache_bytes": "16MiB", "swap_bytes": "16MiB"}
PROMPTS = [random_prompt(length) for length in (1, 16, 40, 100, 300)]
SAMPLING: dict[str, Any] = {"temperature": 0.8, "seed": 5, "ignore_eos": True}
FORGOTTEN_S = 10 * RouterConfig().report_timeout_s + CLOSE_S  # so long a silent worker stays in the books, and its sweep
SHORT, LONG = 24, 600  # tokens of an answer; a node is lost during a long one
Answers = list[list[int]]


@pytest.fixture(scope="module")
def expected() -> Answers:
    """What one engine says that does everything: to each prompt a short answer, to the last a long one."""

    async def answer() -> Answers:
        async with Workers(tiny_model(), pool=PoolConfig.model_validate(POOL)) as workers:
            alone = await workers.start_colocated()
            asked = [*((prompt, SHORT) for prompt in PROMPTS), (PROMPTS[-1], LONG)]
            requests = [make_request(prompt, max_tokens=max_tokens, **SAMPLING) for prompt, max_tokens in asked]
            return [(await workers.client.colocated(alone, request)).token_ids for request in requests]

    return asyncio.run(answer())


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as nodes:
        yield nodes


@pytest.mark.parametrize(
    ("planes", "lost"),
    [
        pytest.param(("nixl", "grpc"), "decode", id="nixl-decode-lost", marks=NEEDS_NIXL),
        pytest.param(("shared_memory", "grpc"), "prefill", id="grpc-prefill-lost"),
        pytest.param(("shared_memory", "grpc"), "decode", id="grpc-decode-lost", marks=pytest.mark.slow),
        pytest.param(("nixl", "grpc"), "prefill", id="nixl-prefill-lost", marks=[NEEDS_NIXL, pytest.mark.slow]),
    ],
)
async def test_two_nodes_answer_as_one_engine(nodes: RayNodes, expected: Answers, planes: tuple[str, str], lost: str) -> None:
    args = {"model": str(tiny_model()), "prefill": POOL, "decode": POOL, "kv_transfer": {"planes": list(planes)}}
    with nodes.serving(**args) as served:
        client = _Client(served)
        assert await client.short_answers() == expected[:-1]
        before = await _check_places(served, nodes, planes)
        await _LOSING[lost](nodes, client, expected)
        after = await _check_places(served, nodes, planes)
        assert [pool for pool in POOLS if after[pool] != before[pool]] == [lost], "the worker of the other node has lived on"
        await served.await_balance()
        await client.close()


async def _check_places(served: Served, nodes: RayNodes, planes: tuple[str, str]) -> dict[str, str]:
    """Where the workers are and by which plane KV comes; their incarnations, by pool."""
    deadline_s = time.monotonic() + FORGOTTEN_S
    while True:
        pools = (await served.books())["pools"]
        endpoints = {name: [worker["endpoint"] for worker in pool["workers"]] for name, pool in pools.items()}
        if all(len(there) == 1 for there in endpoints.values()):
            break
        assert time.monotonic() < deadline_s, endpoints
        await asyncio.sleep(0.1)
    workers = {pool: pools[pool]["workers"][0] for pool in POOLS}
    for pool, worker in workers.items():
        assert worker["endpoint"].startswith(f"{nodes.nodes[pool].address}:")
    assert len({worker["node_id"] for worker in workers.values()}) == len(POOLS)
    [peer] = workers["decode"]["kv_peers"]
    if planes[0] == "shared_memory":
        assert peer["plane"] == "grpc" and peer["reason"].startswith("not shared_memory: "), "another node's memory is out of reach"
    else:
        assert peer["plane"] == planes[0], peer
    return {pool: str(worker["incarnation"]) for pool, worker in workers.items()}


async def _lose_decode(nodes: RayNodes, client: _Client, expected: Answers) -> None:
    """A request in its decode, and some that come while there is no decode worker at all: each is answered once a node is there again."""
    running = await client.running_answer()
    await asyncio.to_thread(nodes.lose, "decode")
    waiting = asyncio.create_task(client.short_answers())
    await asyncio.sleep(2.0)
    assert not running.done() and not waiting.done(), "there is nobody to decode"
    await asyncio.to_thread(nodes.add, "decode")
    assert await waiting == expected[:-1]
    assert await running == expected[-1], "nothing repeated, nothing lost"


async def _lose_prefill(nodes: RayNodes, client: _Client, expected: Answers) -> None:
    """A request in its decode needs the node no more; those that come while there is no prefill worker wait for another."""
    running = await client.running_answer()
    await asyncio.to_thread(nodes.lose, "prefill")
    waiting = asyncio.create_task(client.short_answers())
    assert await running == expected[-1], "its KV was handed over"
    assert not waiting.done(), "there is nobody to prefill"
    await asyncio.to_thread(nodes.add, "prefill")
    assert await waiting == expected[:-1]


_LOSING = {"prefill": _lose_prefill, "decode": _lose_decode}


class _Client:
    """Asks over gRPC, by token ids."""

    def __init__(self, served: Served) -> None:
        self._channel = rpc.channel(served.grpc_target)
        self._stub: Any = InferenceStub(self._channel)

    async def short_answers(self) -> Answers:
        """To all prompts at once."""
        return await asyncio.gather(*(self.answer(prompt, SHORT) for prompt in PROMPTS))

    async def running_answer(self) -> asyncio.Task[list[int]]:
        """A long one, of which the decode worker has said some tokens."""
        begun = asyncio.Event()
        running = asyncio.create_task(self.answer(PROMPTS[-1], LONG, begun))
        await begun.wait()
        return running

    async def answer(self, prompt: list[int], max_tokens: int, begun: asyncio.Event | None = None) -> list[int]:
        """Its token ids; sets `begun` when the decode worker has said some."""
        request = pb.GenerateRequest(model=tiny_model().name, token_ids=pb.TokenIds(ids=prompt), max_tokens=max_tokens, **SAMPLING)
        token_ids: list[int] = []
        async for message in self._stub.Generate(request, timeout=240):
            token_ids += [token.token_id for token in message.tokens]
            if begun is not None and len(token_ids) >= 3:
                begun.set()
        return token_ids

    async def close(self) -> None:
        await self._channel.close(None)
