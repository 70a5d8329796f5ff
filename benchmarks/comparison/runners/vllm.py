"""vLLM's CPU build through its `LLM` class: greedy, without end tokens.

python -m benchmarks.comparison.runners.vllm FOLDER THREADS DTYPE

The environment that vLLM reads when it is imported comes from its row in `catalog.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
import vllm

from benchmarks.comparison.runners.protocol import Generate, TokenIds, serve

_MAX_MODEL_LEN: Final = 2048


def _load() -> tuple[Generate, dict[str, Any]]:
    folder, threads, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    model = vllm.LLM(model=folder, dtype=dtype, max_model_len=_MAX_MODEL_LEN, enable_prefix_caching=False)

    def generate(prompts: TokenIds, max_tokens: int) -> Sequence[int]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate, {"version": vllm.__version__, "torch": torch.__version__, "threads": threads, "weights": dtype}


if __name__ == "__main__":
    serve(_load)
