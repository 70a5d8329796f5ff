"""One worker's engine of Baton, stepped until all answers are whole.

python -m benchmarks.comparison.runners.baton FOLDER THREADS SCHEME CONFIG
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison.runners.protocol import Generate, TokenIds, serve
from benchmarks.hardware import describe_hardware
from cluster.engine.build import build_engine
from cluster.engine.events import Failed, Token
from cluster.types import OrderKey, Request, SamplingParams
from deploy.config_file import load_serve_file


def _load() -> tuple[Generate, dict[str, Any]]:
    folder, threads, scheme, file = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(threads)
    pool = load_serve_file(file).config.decode
    engine = build_engine(pool.model_copy(update={"scheme": scheme, "threads": threads}), folder)
    numbers = itertools.count()

    def generate(prompts: TokenIds, max_tokens: int) -> Sequence[int]:
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        keys = []
        for prompt in prompts:
            number = next(numbers)
            request = Request(f"peers-{number}", 0, tuple(prompt), sampling, OrderKey(0.0, number))
            engine.add(request, stop_after_first_token=False)
            keys.append(request.key)
        counts = dict.fromkeys(keys, 0)
        while engine.has_work:
            for key, event in engine.step():
                if isinstance(event, Failed):
                    raise RuntimeError(event.message)
                counts[key] += isinstance(event, Token)
        return [counts[key] for key in keys]

    settings = {
        "version": describe_hardware().commit,
        "threads": threads,
        "weights": scheme,
        "domain": engine.domain,
        "max_num_batched_tokens": pool.max_num_batched_tokens,
    }
    return generate, settings


if __name__ == "__main__":
    serve(_load)
