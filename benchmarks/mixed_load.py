"""The measured part of `serve_mixed`: a warm-up, then runs of the same shape, and their figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.http_load import LoadResult, Workload, percentile, run_load, served_model
from benchmarks.report import progress

HEADER: Final = ("run", "output tok/s", "all tok/s", "TTFT p50 / p99 (s)", "ITL p50 / p99 (ms)")
_WARM_UP_TOKENS: Final = 8


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
        """The served model's name, and every run."""
        return asyncio.run(self._measure(url))

    async def _measure(self, url: str) -> tuple[str, list[LoadResult]]:
        model = await served_model(url)
        # First steps allocate and pack; a warm machine is what the figures are of.
        await run_load(url, model, Workload(2, self.num_prompt_tokens, _WARM_UP_TOKENS, self.vocab_size, seed=self.seed - 1))
        results = []
        for run in range(self.num_runs):
            workload = Workload(self.num_requests, self.num_prompt_tokens, self.num_output_tokens, self.vocab_size, seed=self.seed + run)
            result = await run_load(url, model, workload, self._say_quarters())
            progress(f"run {run + 1} of {self.num_runs}: {result.output_tokens_per_s:.1f} output tokens/s")
            results.append(result)
        return model, results

    def _say_quarters(self) -> Callable[[int], None]:
        def say(count: int) -> None:
            if count % max(1, self.num_requests // 4) == 0:
                progress(f"{count} of {self.num_requests} answered")

        return say


def figures(result: LoadResult) -> dict[str, float]:
    """Rates and latencies of one run, as they are kept in the results."""
    ttfts = [trace.ttft_s for trace in result.traces]
    gaps = [gap for trace in result.traces for gap in trace.gaps_s]
    tokens = sum(trace.num_prompt_tokens + trace.num_output_tokens for trace in result.traces)
    found = {
        "output_tokens_per_s": result.output_tokens_per_s,
        "tokens_per_s": tokens / result.duration_s,
        "ttft_p50_s": percentile(ttfts, 0.5),
        "ttft_p99_s": percentile(ttfts, 0.99),
        "itl_p50_s": percentile(gaps, 0.5),
        "itl_p99_s": percentile(gaps, 0.99),
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
