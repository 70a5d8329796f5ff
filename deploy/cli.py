"""`baton`: serves a model from a config file, brings models, loads servers, and says whether a running one is well.

Also `python -m deploy.cli`.

Exit codes: 0 served and stopped, 1 the start failed or no request of a benchmark was answered,
2 the command line or the config is wrong (then nothing was started), 130 interrupted. Those of `baton doctor` are in `deploy.doctor`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.load.options import add_options
from cluster.errors import ConfigError
from deploy.doctor import add_options as add_doctor_options
from deploy.doctor import doctor as run_doctor
from deploy.environment import prepare_environment


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except ConfigError as error:
        for line in error.message.splitlines():
            print(f"baton: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton", description="Disaggregated prefill/decode serving of large language models on Ray.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve the model of a config file on this machine, until Ctrl-C")
    serve.add_argument(
        "--config",
        type=Path,
        default=Path(__file__).with_name("local.yaml"),
        metavar="FILE",
        help="Serve config file (default: %(default)s)",
    )
    serve.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the args, as decode.scheme=bf16")
    serve.add_argument("--port", type=int, metavar="N", help="HTTP port, instead of the file's")
    serve.set_defaults(run=_serve)
    pull = commands.add_parser("pull", help="bring a model into the cache, and print its folder")
    pull.add_argument(
        "model", nargs="?", default="smollm2-135m-instruct", help="the demo model, a folder or a GGUF file (default: %(default)s)"
    )
    pull.set_defaults(run=_pull)
    bench = commands.add_parser("bench", help="load a running server, and print latencies, rates and goodput")
    add_options(bench)
    bench.set_defaults(run=_bench)
    doctor = commands.add_parser("doctor", help="say whether the books of a running Baton balance, or what is off")
    add_doctor_options(doctor)
    doctor.set_defaults(run=run_doctor)
    return parser


def _serve(options: argparse.Namespace) -> int:
    prepare_environment()
    from deploy.serve_command import serve  # imports Ray, which reads the environment

    return serve(options.config, options.set, options.port)


def _pull(options: argparse.Namespace) -> int:
    from deploy.pull import resolve_model

    print(resolve_model(options.model, report=lambda line: print(line, file=sys.stderr)))
    return 0


def _bench(options: argparse.Namespace) -> int:
    from benchmarks.serve import bench  # imports the HTTP client

    return bench(options)


if __name__ == "__main__":
    sys.exit(main())
