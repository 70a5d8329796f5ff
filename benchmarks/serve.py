"""Load on a running server, and what came of it: latencies, rates, goodput, errors. The same as `baton bench`.

python -m benchmarks.serve http://127.0.0.1:8000 --concurrency 8
python -m benchmarks.serve http://127.0.0.1:8000 --rate 2 --slo ttft=2.0 --slo tpot=0.05 --results load.jsonl --plot load.png
python -m benchmarks.serve http://127.0.0.1:8000 --search --slo ttft=2.0 --slo tpot=0.05

Exit codes: 0 figures were found, 1 no request was answered or the results could not be kept, 2 the options are wrong,
130 interrupted: the first Ctrl-C sends no more, cancels what is open and says what there is; the second ends at once.
What each figure means is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.load.answer import LoadError
from benchmarks.load.bottleneck import repetitions, warnings
from benchmarks.load.driver import LoadResult
from benchmarks.load.figures import print_figures
from benchmarks.load.options import add_options
from benchmarks.load.plan import Plan, plan_of, transport_of
from benchmarks.load.plot import draw, require_matplotlib
from benchmarks.load.session import Found, Session
from benchmarks.load.statistics import first_errors, summarize
from benchmarks.report import progress, publish
from cluster.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    try:
        return bench(parser.parse_args(argv))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def bench(options: argparse.Namespace) -> int:
    """Runs what `options` ask for; returns the exit code.

    Raises:
        ConfigError: the options contradict each other.
    """
    plan, transport = plan_of(options), transport_of(options)
    if options.plot is not None:
        require_matplotlib()
    try:
        found = asyncio.run(Session(transport, plan).run(options.model))
    except LoadError as error:
        fault = "refuses" if error.kind.startswith(("http_", "grpc_")) else "does not answer"
        print(f"{options.url} {fault} ({error.kind}): {error}", file=sys.stderr)
        return 1
    try:
        _report(options, plan, found)
    except OSError as error:
        print(f"the results could not be kept: {error}", file=sys.stderr)
        return 1
    if found.interrupted:
        return 130
    return 0 if found.result.answered else 1


def _report(options: argparse.Namespace, plan: Plan, found: Found) -> None:
    summary = summarize(found.result)
    if found.interrupted:
        progress("interrupted: these are the figures until then")
    print_figures(summary, first_errors(found.result))
    if plan.slo:
        print(f"goodput: {plan.slo.goodput(found.result):.3f} requests/s, {plan.slo.attainment(found.result.traces):.1%} within the SLOs")
    if found.search:
        print(found.search)
    said = [*warnings(summary), *repetitions(plan.source, found.num_sent)]
    for warning in said:
        progress(f"warning: {warning}")
    publish("serve", {**_settings(options, plan, found), **asdict(summary), "warnings": said, **_judged(plan, found)}, options.results)
    if options.plot is not None:
        draw(found.result, f"{found.model} at {options.url}", options.plot)
        progress(f"drew {options.plot}")


def _settings(options: argparse.Namespace, plan: Plan, found: Found) -> dict[str, Any]:
    """The load as it was in the run that the figures are of."""
    return {
        "url": options.url,
        "api": options.api,
        "model": found.model,
        "loop": {"concurrency": plan.concurrency} if found.rate is None else {"rate": round(found.rate, 4), "burst": plan.burst},
        "seed": plan.seed,
        "num_warm_up": plan.num_warm_up,
        "interrupted": found.interrupted,
    }


def _judged(plan: Plan, found: Found) -> dict[str, Any]:
    if plan.slo is None:
        return {}
    result: LoadResult = found.result
    judged = {
        "slo": {name: bound_s for name, bound_s in asdict(plan.slo).items() if bound_s is not None},
        "attainment": round(plan.slo.attainment(result.traces), 4),
        "goodput_requests_per_s": round(plan.slo.goodput(result), 4),
    }
    return judged | ({"search": asdict(found.search)} if found.search else {})


if __name__ == "__main__":
    sys.exit(main())
