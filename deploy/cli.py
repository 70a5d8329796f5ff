"""`baton`: serves a model from a config file, brings models, and talks to, watches, checks and loads servers. Also `python -m deploy.cli`.

Exit codes: 0 done, or served, watched or talked until the user left; 1 the start failed, the server did not answer, or no request of a
benchmark was answered; 2 the command line, the config or a model's name is wrong (then nothing was started); 130 interrupted.
`deploy.doctor` has its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.load.options import add_options as add_bench_options
from cluster.errors import ConfigError
from deploy import __version__, chat_command, doctor, status_command
from deploy.argument_parser import IntermixedParser
from deploy.environment import prepare_environment

_EXAMPLES: Final = {
    "serve": """
  baton serve                                            the demo model, as deploy/local.yaml says
  baton serve --set model=org/name --set decode.scheme=bf16
  baton serve --config FILE --port 8001""",
    "chat": """
  baton chat                                             with the server on this machine
  baton chat http://HOST:8000 --system "Answer in one sentence."
  baton chat "What is the capital of France?"            one answer
  git diff | baton chat --temperature 0 > review.txt     stdin is the prompt""",
    "status": """
  baton status                                           until Ctrl-C
  baton status http://HOST:8000 --once
  baton status --json | jq .queue""",
    "doctor": """
  baton doctor                                           what every process holds, and whether its books balance
  baton doctor http://HOST:8000 --wait 30                when it is idle""",
    "pull": """
  baton pull                                             the demo model
  baton pull org/name                                    of a hub: HF_ENDPOINT, and HF_TOKEN for gated models
  baton pull org/name@revision
  baton pull ./model.gguf""",
    "bench": """
  baton bench --concurrency 8
  baton bench http://HOST:8000 --rate 2 --slo ttft=2.0 --slo tpot=0.05
  baton bench --search --slo ttft=2.0""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.run is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return int(options.run(options))
    except ConfigError as error:
        for line in error.message.splitlines():
            print(f"baton: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would fail to flush it
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton",
        description="Disaggregated prefill/decode serving of large language models on Ray.",
        epilog="`baton COMMAND --help` has options and examples. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"baton {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=IntermixedParser)
    _add_serve_options(_command(commands, "serve", _serve, "serve the model of a config file on this machine, until Ctrl-C"))
    chat_command.add_options(_command(commands, "chat", chat_command.chat, "talk to a server's model in the terminal, or in a pipe"))
    status_command.add_options(_command(commands, "status", status_command.status, "show workers, queue and KV of a running cluster"))
    doctor.add_options(_command(commands, "doctor", doctor.doctor, "say whether the books of a running Baton balance, or what is off"))
    _add_pull_options(_command(commands, "pull", _pull, "bring a model into the cache, and print its folder"))
    add_bench_options(_command(commands, "bench", _bench, "load a running server, and print latencies, rates and goodput"))
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:{_EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _add_serve_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--config",
        type=Path,
        default=Path(__file__).with_name("local.yaml"),
        metavar="FILE",
        help="Serve config file (default: %(default)s)",
    )
    serve.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the args, as decode.scheme=bf16")
    serve.add_argument("--port", type=int, metavar="N", help="HTTP port, instead of the file's")


def _add_pull_options(pull: argparse.ArgumentParser) -> None:
    pull.add_argument(
        "model",
        nargs="?",
        default="smollm2-135m-instruct",
        metavar="MODEL",
        help="the demo model, a folder, a GGUF file, or a hub id as org/name or org/name@revision (default: %(default)s)",
    )


def _serve(options: argparse.Namespace) -> int:
    prepare_environment()
    from deploy.serve_command import serve  # imports Ray, which reads the environment

    return serve(options.config, options.set, options.port)


def _pull(options: argparse.Namespace) -> int:
    from deploy.calibration import calibrate_cached
    from deploy.pull import resolve_model

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    folder = resolve_model(options.model, report)
    calibrate_cached(folder, report)
    print(folder)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from benchmarks.serve import bench  # imports the HTTP client

    return bench(options)


if __name__ == "__main__":
    sys.exit(main())
