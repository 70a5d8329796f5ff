"""`transformers`' `generate`: one padded batch, greedy, without end tokens. All prompts of a case have one length, so nothing is padded.

python -m benchmarks.comparison.runners.transformers FOLDER THREADS DTYPE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from benchmarks.comparison.runners.protocol import Generate, TokenIds, serve


def _load() -> tuple[Generate, dict[str, Any]]:
    folder, threads, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    model.generation_config.eos_token_id = None  # answers are as long as asked for

    def generate(prompts: TokenIds, max_tokens: int) -> Sequence[int]:
        inputs = torch.tensor(prompts)
        with torch.inference_mode():
            outputs = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_tokens, do_sample=False)
        return [outputs.shape[1] - inputs.shape[1]] * len(prompts)

    return generate, {"version": transformers.__version__, "torch": torch.__version__, "threads": threads, "weights": dtype}


if __name__ == "__main__":
    serve(_load)
