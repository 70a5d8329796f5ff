"""The measured part of `serve_mixed`: a warm-up, then runs of the same shape, and their figures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.load.driver import Budget, ClosedLoop, Driver, LoadResult
from benchmarks.load.http import HttpTarget, HttpTransport
from benchmarks.load.lengths import Fixed
from benchmarks.load.requests import RandomTokens
from benchmarks.load.statistics import percentile
from benchmarks.load.trace import Trace
from benchmarks.load.transport import Transport
from benchmarks.report import progress

HEADER: Final = ("run", "output tok/s", "all tok/s", "TTFT p50 / p99 (s)", "ITL p50 / p99 (ms)")
OnTrace = Callable[[Trace], None]
_WARM_UP_TOKENS: Final = 8


class WrongAnswer(Exception):
    """A run with it is no result."""


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """`num_requests` requests at once, `num_runs` times, each time with other prompts."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    vocab_size: int
    seed: int
    num_runs: int

    def measure(self, url: str) -> tuple[str, list[LoadResult]]:
        """The served model's name, and every run.

        Raises:
            LoadError: the server does not say its model.
            WrongAnswer: an answer was an error, or had another number of tokens than asked for; two runs must do the same work.
        """
        return asyncio.run(self._measure(HttpTransport(HttpTarget(url))))

    async def _measure(self, transport: Transport) -> tuple[str, list[LoadResult]]:
        async with transport:
            model = await transport.find_model()
            # First steps allocate and pack; a warm machine is what the figures are of.
            await self._run(transport, model, num_requests=2, num_output_tokens=_WARM_UP_TOKENS, seed=self.seed - 1)
            results = []
            for run in range(self.num_runs):
                result = await self._run(
                    transport,
                    model,
                    num_requests=self.num_requests,
                    num_output_tokens=self.num_output_tokens,
                    seed=self.seed + run,
                    on_trace=self._say_quarters(),
                )
                progress(f"run {run + 1} of {self.num_runs}: {result.output_tokens_per_s:.1f} output tokens/s")
                results.append(result)
            return model, results

    async def _run(
        self,
        transport: Transport,
        model: str,
        *,
        num_requests: int,
        num_output_tokens: int,
        seed: int,
        on_trace: OnTrace = lambda trace: None,
    ) -> LoadResult:
        """All at once: as many users as requests."""
        source = RandomTokens(Fixed(self.num_prompt_tokens), Fixed(num_output_tokens), self.vocab_size)
        driver = Driver(transport, model, on_trace)
        result = await driver.run(source.requests(seed), ClosedLoop(num_requests), Budget(num_requests))
        for trace in result.traces:
            self._check(trace, num_output_tokens)
        return result

    def _check(self, trace: Trace, num_output_tokens: int) -> None:
        if not trace.answered:
            raise WrongAnswer(f"{trace.error_kind}: {trace.error}")
        found, asked = (trace.num_prompt_tokens, trace.num_output_tokens), (self.num_prompt_tokens, num_output_tokens)
        if found != asked or not trace.chunks:
            raise WrongAnswer(f"asked for {asked} tokens in and out, got {found} in {len(trace.chunks)} chunks")

    def _say_quarters(self) -> OnTrace:
        counts = itertools.count(1)

        def say(trace: Trace) -> None:
            if (count := next(counts)) % max(1, self.num_requests // 4) == 0:
                progress(f"{count} of {self.num_requests} answered")

        return say


def figures(result: LoadResult) -> dict[str, float]:
    """Rates and latencies of one run, as they are kept in the results."""
    ttfts = [trace.ttft_s for trace in result.traces]
    itls_s = [itl_s for trace in result.traces for itl_s in trace.itls_s]
    tokens = sum(trace.num_prompt_tokens + trace.num_output_tokens for trace in result.traces)
    found = {
        "output_tokens_per_s": result.output_tokens_per_s,
        "tokens_per_s": tokens / result.duration_s,
        "ttft_p50_s": percentile(ttfts, 0.5),
        "ttft_p99_s": percentile(ttfts, 0.99),
        "itl_p50_s": percentile(itls_s, 0.5),
        "itl_p99_s": percentile(itls_s, 0.99),
    }
    return {name: round(value, 4) for name, value in found.items()}


def row(name: str, result: LoadResult) -> Sequence[str]:
    """One run as a row under `HEADER`."""
    found = figures(result)
    return [
        name,
        f"{found['output_tokens_per_s']:.1f}",
        f"{found['tokens_per_s']:.0f}",
        f"{found['ttft_p50_s']:.2f} / {found['ttft_p99_s']:.2f}",
        f"{found['itl_p50_s'] * 1e3:.0f} / {found['itl_p99_s'] * 1e3:.0f}",
    ]
