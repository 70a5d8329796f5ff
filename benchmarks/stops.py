"""What a process that stops for a while does to the streams that do not go through it, and to memory, on a Baton that runs already.

python -m benchmarks.stops 127.0.0.1:9000 --pid PID          PID of a gateway, prefill or decode worker, of which there should be two

Streams run over gRPC, each on a connection of its own. The process gets SIGSTOP, and later SIGCONT. Then the same streams run again,
without a stop, as the control; and so on in turn. Streams that have no token while the process stands still go through it. All others are
compared with the control, token by token: medians and 99th percentiles of the inter-token latency, and the longest gaps. A stream that
is answered in full before the stop is over tells neither: such a run is refused.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any, Final

from grpc import aio

from benchmarks.interruption.session import Schedule, measure
from benchmarks.interruption.stop import EndedEarly
from benchmarks.report import RESULTS, publish, table

_HEADER: Final = (
    *("pair", "streams stopped", "resumed", "failures", "tokens", "ratio", "ITL p50", "ITL p99", "longest gap"),
    *("control: ITL p50", "ITL p99", "longest gap"),
)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="host:port of the gRPC API")
    parser.add_argument("--pid", type=int, required=True, help="the process to stop")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long it stops (default: %(default)s)")
    parser.add_argument("--watch", type=float, default=10.0, help="seconds after the stop (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=2, help="runs with a stop, each with its control (default: %(default)s)")
    options = parser.parse_args()
    try:
        schedule = Schedule(options.seconds, watch_s=options.watch, num_pairs=options.pairs)
        found = asyncio.run(measure(options.target, options.pid, options.streams, schedule))
    except (EndedEarly, ProcessLookupError) as error:
        raise SystemExit(str(error)) from error
    except aio.AioRpcError as error:
        raise SystemExit(f"{options.target}: {error.code().name}: {error.details()}") from error
    except TimeoutError as error:
        raise SystemExit(f"{options.target}: the streams do not begin") from error
    print(found["process"])
    print(table(_HEADER, [*(_row(str(index), pair) for index, pair in enumerate(found["pairs"], 1)), _row("all", found)]))
    print(f"slowest over fastest control: {_shown(found['control_spread'])}")
    publish("stops", found, RESULTS / "stops.jsonl")


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _row(name: str, found: dict[str, Any]) -> list[str]:
    counts = [str(found.get(key, "")) for key in ("streams_stopped", "streams_resumed")]
    start = [name, *counts, " ".join(found.get("failures", ())), str(found["tokens"])]
    if found["ratio"] is None:
        return [*start, *["-"] * 7]
    times = [f"{found[run][key] * 1000:.1f} ms" for run in ("stop", "control") for key in ("itl_p50_s", "itl_p99_s", "longest_gap_s")]
    return [*start, _shown(found["ratio"]), *times]


if __name__ == "__main__":
    main()
