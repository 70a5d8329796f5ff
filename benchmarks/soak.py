"""Hours of mixed load with cancels on a whole Baton, and whether any of its processes grows.

python -m benchmarks.soak                                              starts a Baton, half an hour at 60 % of its capacity
python -m benchmarks.soak --duration 300 --warm-up 60 --rate 2 --plot soak.png
python -m benchmarks.soak --idle 600                                   and what grows in ten minutes without requests after it
python -m benchmarks.soak --url http://127.0.0.1:8000 --pid PID --grpc-target 127.0.0.1:9000

Exit codes: 0 every process is flat, no request failed and the books balance in the end; 1 not so; 2 the options are wrong;
130 interrupted, with the figures so far: none while the cluster starts or its capacity is measured. What flat means is in
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from benchmarks.endurance.options import add_options, check
from benchmarks.endurance.plot import draw
from benchmarks.endurance.report import as_json, print_figures, problems_of
from benchmarks.endurance.session import Soaked, SoakSession
from benchmarks.endurance.target import StartFailed, Target, running, started
from benchmarks.endurance.verdict import growths_of
from benchmarks.load.answer import LoadError
from benchmarks.load.plot import require_matplotlib
from benchmarks.report import progress, publish
from cluster.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args(argv)
    try:
        check(options)
        if options.plot is not None:
            require_matplotlib()
        with _target(options) as target:
            return _report(options, asyncio.run(SoakSession(target, options).run()))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    except (StartFailed, LoadError, OSError) as error:
        print(f"the soak failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: there are no figures", file=sys.stderr)
        return 130


def _target(options: argparse.Namespace) -> AbstractContextManager[Target]:
    if options.url is not None:
        return nullcontext(running(options.url, options.grpc_target, options.pid))
    return started(options.config, options.set, options.port, options.grpc_port)


def _report(options: argparse.Namespace, soaked: Soaked) -> int:
    growths = growths_of(soaked.histories, options.warm_up)
    problems = problems_of(soaked, growths, options.warm_up)
    print_figures(soaked, growths, problems)
    settings = {"seed": options.seed, "warm_up_s": options.warm_up, "cancel_share": options.cancel_share, "overrides": options.set}
    publish("soak", {**settings, **as_json(soaked, growths, problems)}, options.results)
    if options.plot is not None:
        draw(soaked.histories, options.warm_up, f"{soaked.counts.num_sent} requests, {soaked.rate:.2f} a second", options.plot)
        progress(f"drew {options.plot}")
    if soaked.interrupted:
        return 130
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
