"""A summary as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.load.statistics import Latency, Summary
from benchmarks.report import table


def print_figures(summary: Summary, errors: Mapping[str, str]) -> None:
    """Latencies as a table, rates and errors below it; `errors` are the first message of each kind."""
    latencies = {"TTFT": summary.ttft, "TPOT": summary.tpot, "ITL": summary.itl, "chunk gap": summary.chunk_gap, "end-to-end": summary.e2e}
    rows = [_row(name, latency) for name, latency in latencies.items() if latency]
    if rows:
        print(table(("ms", "mean", "p50", "p90", "p99"), rows))
    print(f"{summary.num_answered} of {summary.num_requests} requests answered in {summary.duration_s:.1f} s: {_rates(summary)}")
    for kind, count in summary.errors.items():
        print(f"{count} failed with {kind}: {errors[kind]}")
    lag_ms = summary.lag.p99_s * 1e3 if summary.lag else 0.0
    print(f"the load generator used {summary.cpu_share:.0%} of a core and sent at most {lag_ms:.1f} ms late (p99)")


def _row(name: str, latency: Latency) -> list[str]:
    return [name, *(f"{value_s * 1e3:.1f}" for value_s in (latency.mean_s, latency.p50_s, latency.p90_s, latency.p99_s))]


def _rates(summary: Summary) -> str:
    tokens = f"{summary.num_prompt_tokens} tokens in, {summary.num_output_tokens} out"
    return f"{summary.requests_per_s:.3f} requests/s, {summary.output_tokens_per_s:.1f} output tokens/s ({tokens})"
