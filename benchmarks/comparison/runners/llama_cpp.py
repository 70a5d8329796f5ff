"""llama.cpp through `llama-cpp-python`, on the GGUF file itself: greedy, and past end tokens. Its call takes one sequence.

python -m benchmarks.comparison.runners.llama_cpp GGUF THREADS
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import llama_cpp

from benchmarks.comparison.runners.protocol import Generate, TokenIds, serve

_CONTEXT: Final = 2048


def _load() -> tuple[Generate, dict[str, Any]]:
    gguf, threads = Path(sys.argv[1]), int(sys.argv[2])
    model = llama_cpp.Llama(str(gguf), n_ctx=_CONTEXT, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def generate(prompts: TokenIds, max_tokens: int) -> Sequence[int]:
        if len(prompts) > 1:
            raise ValueError("its call takes one sequence")
        return [sum(1 for _ in islice(model.generate(prompts[0], temp=0.0), max_tokens))]

    return generate, {"version": llama_cpp.__version__, "threads": threads, "weights": gguf.stem.rpartition(".")[2]}


if __name__ == "__main__":
    serve(_load)
