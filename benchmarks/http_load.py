"""A load on a running Baton: token-id completions over HTTP, streamed, all sent at once.

Prompts are random but seeded and share no prefix, so no cache helps, and `ignore_eos` makes every answer as long as asked for:
two runs do the same work. Times are of the client, from the moment the request is sent.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_requests` equal requests; `seed` fixes the prompts."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    vocab_size: int
    seed: int

    def prompts(self) -> list[list[int]]:
        """Token ids of each prompt. The first ids of a vocabulary are often control tokens, so they are left out."""
        rng = random.Random(self.seed)
        return [[rng.randrange(256, self.vocab_size) for _ in range(self.num_prompt_tokens)] for _ in range(self.num_requests)]


@dataclass(frozen=True, slots=True)
class Trace:
    """One answered request. `chunks_s` are arrivals of SSE chunks with text, after it was sent; one chunk may carry several tokens."""

    chunks_s: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.chunks_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.chunks_s, self.chunks_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All requests of one run, answered in full."""

    duration_s: float
    traces: tuple[Trace, ...]

    @property
    def output_tokens_per_s(self) -> float:
        return sum(trace.num_output_tokens for trace in self.traces) / self.duration_s


async def run_load(url: str, model: str, workload: Workload, on_done: Callable[[int], None] = lambda count: None) -> LoadResult:
    """Sends the whole workload at once and waits for every answer; `on_done` gets the number answered so far.

    Raises:
        ExceptionGroup: of RuntimeErrors, for answers that were errors or had another number of tokens than asked for.
    """
    traces: list[Trace] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_read=300)) as session:
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_complete(session, url, model, prompt, workload)) for prompt in workload.prompts()]
            for answered in asyncio.as_completed(tasks):
                traces.append(await answered)
                on_done(len(traces))
        return LoadResult(time.perf_counter() - started_s, tuple(traces))


async def served_model(url: str) -> str:
    """The name of the model that a running Baton serves."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models", raise_for_status=True) as response:
        listed = await response.json()
    return str(listed["data"][0]["id"])


async def _complete(session: aiohttp.ClientSession, url: str, model: str, prompt: Sequence[int], workload: Workload) -> Trace:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": workload.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_s = time.perf_counter()
    chunks_s: list[float] = []
    usage: dict[str, int] = {}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            event = _parse_event(line)
            if "error" in event:
                raise RuntimeError(f"the stream ended in an error: {event['error']}")
            if any(choice["text"] for choice in event.get("choices", ())):
                chunks_s.append(time.perf_counter() - started_s)
            usage = event.get("usage") or usage
    trace = Trace(tuple(chunks_s), usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
    if (trace.num_prompt_tokens, trace.num_output_tokens) != (len(prompt), workload.num_output_tokens) or not chunks_s:
        raise RuntimeError(f"asked for {len(prompt)} + {workload.num_output_tokens} tokens, the usage says {usage}")
    return trace


def _parse_event(line: bytes) -> dict[str, Any]:
    """The JSON of one SSE line; empty for what carries none (blank lines, comments, `[DONE]`)."""
    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
    event: dict[str, Any] = {} if data in (b"", b"[DONE]") else json.loads(data)
    return event


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(share * 1000) // 1000) - 1)]
