"""Quality of served pairs: perplexity, greedy agreement and divergence from bf16 on ordinary English.

    python -m benchmarks.quality                        every scheme alone and int8 prefill with int4 decode, with bf16 and int8 KV
    python -m benchmarks.quality int8/bf16              another pair, as prefill/decode
    python -m benchmarks.quality int4+kv8/int8+kv8      with KV in int8
    python -m benchmarks.quality bf16/bf16+kv8          with KV that decode rounds to int8 as it arrives

`int8-unsmoothed` is int8 without the model's smoothing factors, as a folder without them is served.

Contexts of 512 tokens by the prefill scheme, KV handed over, the next 512 tokens teacher-forced through the decode scheme. The text is
Baton's own (`data/prose.txt`). Agreement counts, position by position, where a pair would choose the token that the base chooses;
divergence is the mean over positions of KL(base || pair) between the distributions of the next token, in nat. The base is bf16/bf16
unless `--base` names another.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.hardware import describe_hardware
from benchmarks.report import RESULTS, progress, publish, table
from benchmarks.teacher_forcing import Continuations, continue_windows, cut_windows
from cluster.config import PoolConfig
from cluster.engine.model_build import BuiltModel, build_model
from cluster.kv_layout import can_become
from cluster.model_config import SMOOTHING_FILE
from deploy.calibration import calibrate_cached
from deploy.config_file import load_serve_file
from deploy.pull import resolve_model

BASE: Final = "bf16/bf16"
_UNSMOOTHED: Final = "int8-unsmoothed"
_SCHEMES: Final = ("bf16", _UNSMOOTHED, "int8", "int4", "float32")
_INT8_KV: Final = "+kv8"
_DEFAULT_PAIRS: Final = (
    *(
        f"{prefill}{kv}/{decode}{kv}"
        for prefill, decode in (("bf16", "bf16"), (_UNSMOOTHED, _UNSMOOTHED), ("int8", "int8"), ("int4", "int4"), ("int8", "int4"))
        for kv in ("", _INT8_KV)
    ),
    "bf16/bf16+kv8",
)
_TEXT: Final = Path(__file__).parent / "data" / "prose.txt"
_PROGRESS_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One pair's result and the time it took."""

    pair: str
    continuations: Continuations
    divergence: float  # mean KL(base || pair), nat
    duration_s: float

    def figures(self, base: Continuations) -> dict[str, Any]:
        """What is published of it."""
        return {
            "pair": self.pair,
            "perplexity": round(self.continuations.perplexity, 4),
            "perplexity_change": round(self.continuations.perplexity / base.perplexity - 1, 5),
            "greedy_agreement": round(self.continuations.agreement(base), 5),
            "divergence_nat": round(self.divergence, 6),
            "num_scored_tokens": self.continuations.losses.numel(),
            "duration_s": round(self.duration_s, 1),
        }


def main() -> None:
    """The command."""
    options = _options()
    torch.set_num_threads(options.threads)
    progress(str(describe_hardware()))
    config = load_serve_file(options.config).config
    folder = resolve_model(config.model, progress)
    calibrate_cached(folder, progress)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = options.text.read_text(encoding="utf-8")
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    num_windows = -(-options.tokens // options.continuation)
    windows = cut_windows(token_ids, options.context, options.continuation, num_windows)
    progress(f"{len(token_ids)} tokens of text: {num_windows} windows of {options.context} + {options.continuation}")
    bench = PairBench(config.decode, folder, windows, options.context)
    _publish(config.model, options, [bench.measure(pair) for pair in dict.fromkeys([options.base, *options.pairs])])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", type=parse_pair, default=_DEFAULT_PAIRS, help="prefill/decode schemes, `+kv8` for int8 KV")
    parser.add_argument("--base", type=parse_pair, default=BASE, help="what the others are compared with (default: %(default)s)")
    parser.add_argument(
        "--config", type=Path, default=Path("deploy/local.yaml"), help="names model, kernels, blocks (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="to score (default: %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window's context (default: %(default)s)")
    parser.add_argument("--continuation", type=int, default=512, help="tokens scored in a window (default: %(default)s)")
    parser.add_argument("--text", type=Path, default=_TEXT, help="another text (default: Baton's own)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch threads (default: %(default)s)")
    return parser.parse_args()


def parse_pair(text: str) -> str:
    """`PREFILL/DECODE`, checked; for argparse."""
    prefill, slash, decode = text.partition("/")
    if not slash or not {prefill.removesuffix(_INT8_KV), decode.removesuffix(_INT8_KV)} <= set(_SCHEMES):
        raise argparse.ArgumentTypeError(f"{text!r} is not PREFILL/DECODE with schemes of {', '.join(_SCHEMES)}")
    if not can_become(_kv_dtype(prefill), _kv_dtype(decode)):
        raise argparse.ArgumentTypeError(f"{text!r}: KV in {_kv_dtype(prefill)} cannot become {_kv_dtype(decode)}")
    if f"float32{_INT8_KV}" in (prefill, decode):
        raise argparse.ArgumentTypeError("float32 has float32 KV")
    return text


def _kv_dtype(scheme: str) -> str:
    if scheme.endswith(_INT8_KV):
        return "int8"
    return "float32" if scheme == "float32" else "bf16"


class PairBench:
    """Runs pairs over the same windows, the base first; each scheme's model is built once."""

    def __init__(self, pool: PoolConfig, folder: Path, windows: list[list[int]], num_context: int) -> None:
        self._pool = pool
        self._folder = folder
        self._windows = windows
        self._num_context = num_context
        self._built: dict[str, BuiltModel] = {}
        self._base_log_probs: list[Tensor] = []  # of each step: float32 [num_windows, vocab_size]

    def measure(self, pair: str) -> Measured:
        """Runs one pair."""
        prefill, decode = (self._model(scheme) for scheme in pair.split("/"))
        progress(f"{pair}: prefill")
        started_s = time.perf_counter()
        divergences: list[Tensor] = []
        is_base = not self._base_log_probs
        say = self._sayer(pair)

        def on_step(step: int, logits: Tensor) -> None:
            say(step)
            log_probs = logits.float().log_softmax(-1)
            if is_base:
                self._base_log_probs.append(log_probs)
            divergences.append(divergence(self._base_log_probs[step], log_probs))

        continuations = continue_windows(prefill, decode, self._windows, self._num_context, on_step)
        measured = Measured(pair, continuations, float(torch.stack(divergences).mean()), time.perf_counter() - started_s)
        progress(f"{pair}: perplexity {continuations.perplexity:.3f} after {measured.duration_s:.0f} s")
        return measured

    def _model(self, scheme: str) -> BuiltModel:
        if scheme not in self._built:
            progress(f"loading the model as {scheme}")
            name = scheme.removesuffix(_INT8_KV)
            config = self._pool.model_copy(update={"scheme": "int8" if name == _UNSMOOTHED else name, "kv_dtype": _kv_dtype(scheme)})
            with _without_smoothing(self._folder) if name == _UNSMOOTHED else nullcontext(self._folder) as folder:
                self._built[scheme] = build_model(config, folder, len(self._windows[0]))
        return self._built[scheme]

    def _sayer(self, pair: str) -> Callable[[int], None]:
        num_steps = len(self._windows[0]) - 1 - self._num_context
        said_s = time.perf_counter()

        def say(step: int) -> None:
            nonlocal said_s
            if time.perf_counter() - said_s > _PROGRESS_S:
                said_s = time.perf_counter()
                progress(f"{pair}: decode step {step} of {num_steps}")

        return say


def divergence(base_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """KL(base || other) of each row, in nat: float32 `[num_rows, vocab_size]` both → float64 `[num_rows]`."""
    return torch.nn.functional.kl_div(log_probs, base_log_probs, reduction="none", log_target=True).sum(-1, dtype=torch.float64)


@contextmanager
def _without_smoothing(folder: Path) -> Iterator[Path]:
    """The model's folder as it is before a calibration."""
    with tempfile.TemporaryDirectory() as bare:
        for path in folder.iterdir():
            if path.name != SMOOTHING_FILE:
                (Path(bare) / path.name).symlink_to(path)
        yield Path(bare)


def _publish(model: str, options: argparse.Namespace, measured: list[Measured]) -> None:
    base = measured[0].continuations
    figures = [item.figures(base) for item in measured]
    rows = [
        [
            item["pair"],
            f"{item['perplexity']:.3f}",
            f"{item['perplexity_change']:+.2%}",
            f"{item['greedy_agreement']:.1%}",
            f"{item['divergence_nat']:.4f}",
            f"{item['duration_s']:.0f} s",
        ]
        for item in figures
    ]
    print(table(["prefill/decode", "perplexity", f"against {options.base}", "greedy agreement", "divergence, nat", "time"], rows))
    settings = {
        "base": options.base,
        "text": options.text.name,
        "context": options.context,
        "continuation": options.continuation,
        "threads": options.threads,
    }
    publish("quality", {"model": model, **settings, "pairs": figures}, RESULTS / "quality.jsonl")


if __name__ == "__main__":
    main()
