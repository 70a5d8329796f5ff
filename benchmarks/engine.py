"""One worker's engine alone, without Ray: real steps against what the machine can read and compute at best.

    python -m benchmarks.engine                                   the decode pool of deploy/local.yaml
    python -m benchmarks.engine --scheme int4 --kv-dtype int8     other weights and KV
    python -m benchmarks.engine --scheme int8 --compare torch     every case on torch's kernels too, in turns
    python -m benchmarks.engine --batch 1 --context 128 --prompt --profile steps.txt

A decode sample is one `Engine.step` of the batch; a prefill sample is all steps of one prompt up to its first token. Scheduling, sampling
and Python are in the step's time; "rest" is what of it was spent outside decoder and head.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, get_args

import torch

from benchmarks.hardware import describe_hardware
from benchmarks.report import RESULTS, progress, publish, table
from benchmarks.steps.bench import EngineBench, Sample
from benchmarks.steps.case import Case, DecodeCase, make_cases
from benchmarks.steps.limits import MachineLimits, measure_limits
from benchmarks.steps.profile import num_profiled_samples, profile_case
from benchmarks.steps.result import CaseResult
from cluster.config import EngineConfig, KVDtype, PoolConfig, Scheme
from cluster.errors import BatonError, ConfigError
from deploy.config_file import load_serve_file
from deploy.pull import resolve_model

_NUM_WARM_UP_STEPS: Final = 3
_KERNELS: Final = ("native", "torch", "reference")
_MAX_THREADS: Final = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    options = _options(arguments)
    try:
        _run(options)
    except BatonError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("deploy/local.yaml"), help="its decode pool is the default (%(default)s)")
    parser.add_argument("--model", help="another than the config's: a name, folder or GGUF file")
    parser.add_argument("--scheme", choices=get_args(Scheme), help="instead of the pool's")
    parser.add_argument("--kv-dtype", choices=get_args(KVDtype), help="instead of the pool's")
    parser.add_argument("--kernels", choices=_KERNELS, help="instead of the pool's")
    parser.add_argument("--threads", type=_threads, help="instead of the pool's")
    parser.add_argument("--compare", choices=_KERNELS, metavar="KERNELS", help="runs every case on these kernels too, in turns")
    parser.add_argument("--batch", type=_positive, nargs="*", default=[1, 8, 32], help="of decode; none: no decode (1 8 32)")
    parser.add_argument("--context", type=_positive, nargs="+", default=[128, 1024], help="tokens at the first decode step (128 1024)")
    parser.add_argument("--prompt", type=_positive, nargs="*", default=[512, 1024], help="tokens of a prefill; none: no prefill (512 1024)")
    parser.add_argument("--steps", type=_positive, default=30, help="decode steps measured for each case (%(default)s)")
    parser.add_argument("--prompts", type=_positive, default=5, help="prompts measured for each case (%(default)s)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="afterwards a profile of every case, into this file")
    parser.add_argument("--results", type=Path, default=RESULTS / "engine.jsonl", help="gets the line of JSON (%(default)s)")
    options = parser.parse_args(arguments)
    if not options.batch and not options.prompt:
        parser.error("--batch, --prompt: nothing to run")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _threads(text: str) -> int:
    value = _positive(text)
    if value > _MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text} is more than {_MAX_THREADS}")
    return value


def _run(options: argparse.Namespace) -> None:
    pool = load_serve_file(options.config).config
    model = options.model or pool.model
    config = engine_config(pool.decode, options)
    folder = resolve_model(model, progress)
    torch.set_num_threads(config.threads)
    progress(str(describe_hardware()))
    progress("measuring the machine's limits")
    limits = measure_limits(config.threads)
    progress(str(limits) if limits else "no native kernels, so no probe of the machine's limits")
    cases = make_cases(options.batch, options.context, options.prompt)
    benches = [_load(config, folder, cases, options)]
    if options.compare:
        benches.append(_load(config.model_copy(update={"kernels": options.compare}), folder, cases, options))
    results = [result for case in cases for result in measure(benches, case, _num_samples(case, options), config.scheme)]
    if limits and (later := measure_limits(config.threads)):
        limits = limits.best(later)
        progress(f"limits, the better of before and after: {limits}")
    _publish(model, config, limits, options, results)
    if options.profile:
        _profile(options.profile, benches, cases)


def engine_config(pool: PoolConfig, options: argparse.Namespace) -> EngineConfig:
    """The pool with the options in place of its own keys.

    Raises:
        ConfigError: they do not go together.
    """
    asked = {key: getattr(options, key) for key in ("scheme", "kv_dtype", "kernels", "threads") if getattr(options, key) is not None}
    if asked.get("scheme") == "float32":
        asked.setdefault("kv_dtype", "float32")
    config = pool.model_copy(update=asked)
    if (config.scheme == "float32") != (config.kv_dtype == "float32"):
        raise ConfigError(f"kv_dtype: {config.kv_dtype} does not go with scheme {config.scheme}", param="kv_dtype")
    if options.compare == config.kernels:
        raise ConfigError(f"compare: the kernels are {config.kernels} already", param="compare")
    return config


def _load(config: EngineConfig, folder: Path, cases: Sequence[Case], options: argparse.Namespace) -> EngineBench:
    progress(f"loading the model as {config.scheme} with {config.kv_dtype} KV for {config.kernels} kernels")
    most = max(_num_samples(case, options) for case in cases)
    return EngineBench(config, folder, cases, max(most + _NUM_WARM_UP_STEPS, num_profiled_samples()))


def _num_samples(case: Case, options: argparse.Namespace) -> int:
    number: int = options.steps if isinstance(case, DecodeCase) else options.prompts
    return number


def measure(benches: Sequence[EngineBench], case: Case, num_samples: int, scheme: str) -> list[CaseResult]:
    """Runs a case on every engine, one sample of each in turn, so that whatever else the machine does hits all alike."""
    for bench in benches:
        bench.start(case)
        for _ in range(_NUM_WARM_UP_STEPS if isinstance(case, DecodeCase) else 1):
            bench.sample()
    samples: list[list[Sample]] = [[] for _ in benches]
    for _ in range(num_samples):
        for bench, taken in zip(benches, samples, strict=True):
            taken.append(bench.sample())
    for bench in benches:
        bench.finish()
    results = [CaseResult(case, bench.kernels_name, scheme, taken) for bench, taken in zip(benches, samples, strict=True)]
    progress(f"{case}: " + ", ".join(f"{result.step_s * 1e3:.2f} ms on {result.kernels}" for result in results))
    return results


def _publish(
    model: str, config: EngineConfig, limits: MachineLimits | None, options: argparse.Namespace, results: Sequence[CaseResult]
) -> None:
    figures = [result.figures(limits) for result in results]
    header = ["case", "kernels", "step", "least", "tokens/s", "kernels'", "rest", "GB/s", "of read", "GOP/s", "of peak"]
    print(table(header, [_row(str(result.case), item) for result, item in zip(results, figures, strict=True)]))
    if options.compare:
        pairs = list(zip(results[::2], results[1::2], strict=True))
        print(
            table(
                ["case", f"{pairs[0][1].kernels} / {pairs[0][0].kernels}"], [[str(a.case), f"{b.step_s / a.step_s:.2f}"] for a, b in pairs]
            )
        )
    settings = {key: getattr(config, key) for key in ("scheme", "kv_dtype", "threads", "block_size", "max_num_batched_tokens")}
    result = {"model": model, **settings, "limits": asdict(limits) if limits else None, "cases": figures}
    publish("engine", result, options.results)


def _row(case: str, item: dict[str, Any]) -> list[str]:
    return [
        case,
        item["kernels"],
        f"{item['step_s'] * 1e3:.2f} ms",
        f"{item['min_step_s'] * 1e3:.2f} ms",
        f"{item['tokens_per_s']:.0f}",
        f"{item['kernels_s'] * 1e3:.2f} ms",
        f"{item['rest_s'] * 1e3:.2f} ms ({item['rest_s'] / item['step_s']:.1%})",
        f"{item['gb_per_s']:.1f}",
        _share(item["share_of_read"]),
        f"{item['gop_per_s']:.0f}",
        _share(item["share_of_peak"]),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _profile(file: Path, benches: Sequence[EngineBench], cases: Sequence[Case]) -> None:
    sections = []
    for case in cases:
        for bench in benches:
            progress(f"profile: {case} on {bench.kernels_name}")
            sections.append(profile_case(bench, case))
    file.write_text("\n".join(sections), encoding="utf-8")
    progress(f"wrote {file}")


if __name__ == "__main__":
    raise SystemExit(main())
