"""What a KV handoff costs: the wires by themselves, and what a client sees of it.

python -m benchmarks.transfer planes        reads between two processes, by size, wire and block size
python -m benchmarks.transfer exposed       how late the second token comes, with overlap and without, by prompt length and wire
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.endurance.target import StartFailed
from benchmarks.handoff import exposed, exposed_figures, read_figures
from benchmarks.handoff.long_context import long_context
from benchmarks.handoff.read_figures import Reads
from benchmarks.handoff.reader import Unavailable, measure
from benchmarks.handoff.wire import WIRES, Case
from benchmarks.hardware import describe_hardware
from benchmarks.load.answer import LoadError
from benchmarks.report import RESULTS, progress, publish, table
from cluster.config import parse_bytes
from cluster.errors import ConfigError
from deploy.config_file import load_serve_file
from deploy.pull import resolve_model

_PLANES: Final = """Reads of scattered KV blocks of the demo model's shape in bfloat16, the owner in a process of its own. Each read is
followed by a copy of as many bytes inside the reader, and by a bare NIXL READ of the same blocks: over shared memory beside shared_memory
and nixl, over TCP beside nixl-tcp and grpc. On a shared machine only the ratios mean something."""
_EXPOSED: Final = """Exposed transfer: t(second token) - t(first token) - one decode step, as the client sees it over gRPC. Two Batons stand
side by side, one with kv_transfer.overlap and one without, and are asked in turns, one request at a time; medians over the rounds. A model
whose own context is too short for the longest prompt is said to have a longer one: the text is worth nothing then, the times are."""
_SIZES: Final = (2**20, 16 * 2**20, 64 * 2**20)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True, metavar="PART")
    planes = parts.add_parser("planes", help="reads between two processes", description=_PLANES)
    planes.add_argument("--wires", nargs="+", choices=WIRES, default=list(WIRES), help="default: all")
    planes.add_argument("--block-sizes", nargs="+", type=int, default=[8, 32, 128], metavar="TOKENS", help="default: 8 32 128")
    planes.add_argument("--sizes", nargs="+", type=_size, default=_SIZES, help="of a read (default: 1MiB 16MiB 64MiB)")
    planes.add_argument("--repeats", type=int, default=15, help="reads of each size, after a warm-up (default: %(default)s)")
    planes.set_defaults(run=_run_planes)
    seen = parts.add_parser("exposed", help="what a client sees", description=_EXPOSED)
    seen.add_argument("--wires", nargs="+", choices=WIRES, default=list(WIRES), help="default: all")
    seen.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192], metavar="TOKENS", help="default: 512 2048 8192")
    seen.add_argument("--rounds", type=int, default=9, help="requests of each length to each Baton, after a warm-up (default: %(default)s)")
    seen.add_argument(
        "--output-tokens", type=int, default=24, help="of each answer; the decode step is their median (default: %(default)s)"
    )
    seen.add_argument("--config", type=Path, default=Path("deploy/local.yaml"), help="default: %(default)s")
    seen.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `baton serve`, for both")
    seen.add_argument("--port", type=int, default=8028, help="and the three that follow (default: %(default)s)")
    seen.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    seen.set_defaults(run=_run_exposed)
    options = parser.parse_args()
    progress(str(describe_hardware()))
    try:
        options.run(options)
    except (ConfigError, StartFailed, LoadError) as error:
        raise SystemExit(str(error)) from error


def _size(text: str) -> int:
    return int(parse_bytes(text))


def _run_planes(options: argparse.Namespace) -> None:
    sizes = tuple(sorted(options.sizes))
    found: list[Reads] = []
    unavailable: dict[str, str] = {}
    for name in options.wires:
        for block_size in options.block_sizes:
            progress(f"{name}, blocks of {block_size} tokens")
            try:
                found += measure(Case(WIRES[name], block_size, sizes, options.repeats))
            except Unavailable as error:
                unavailable[name] = str(error)
                progress(f"not available: {error}")
                break
    print(table(read_figures.HEADER, [reads.row() for reads in found]))
    for name, reason in unavailable.items():
        print(f"{name}: {reason}")
    result: dict[str, Any] = {"part": "planes", "repeats": options.repeats, "reads": [reads.record() for reads in found]}
    publish("transfer", {**result, "unavailable": unavailable}, RESULTS / "transfer.jsonl")


def _run_exposed(options: argparse.Namespace) -> None:
    lengths = tuple(sorted(options.lengths))
    config = load_serve_file(options.config, options.set).config
    with long_context(resolve_model(config.model, progress), lengths[-1] + options.output_tokens) as (folder, own_limit):
        plan = exposed.Plan(
            options.config,
            (*options.set, f"model={folder}"),
            port=options.port,
            lengths=lengths,
            output_tokens=options.output_tokens,
            num_rounds=options.rounds,
            seed=options.seed,
        )
        found = [one for name in options.wires for one in exposed.measure(plan, WIRES[name])]
    print(table(exposed_figures.HEADER, [row for one in found for row in one.rows()]))
    if own_limit is not None:
        print(f"the model's own context of {own_limit} tokens was lengthened: its text is worth nothing here")
    pools = {
        name: {"scheme": pool.scheme, "kv_dtype": pool.kv_dtype, "block_size": pool.block_size, "threads": pool.threads}
        for name, pool in (("prefill", config.prefill), ("decode", config.decode))
    }
    load = {key: value for key, value in asdict(plan).items() if key not in ("config", "overrides")}
    result = {"part": "exposed", "model": config.model, "own_max_model_len": own_limit, "pools": pools, "load": load}
    publish("transfer", {**result, "exposed": [one.record() for one in found]}, RESULTS / "transfer.jsonl")


if __name__ == "__main__":
    main()
