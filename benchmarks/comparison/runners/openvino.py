"""OpenVINO GenAI's continuous batching over an int8 export: greedy, without end tokens, its own defaults elsewhere.

python -m benchmarks.comparison.runners.openvino FOLDER THREADS
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import openvino
import openvino_genai

from benchmarks.comparison.runners.protocol import Generate, TokenIds, serve

_CACHE_GIB: Final = 2


def _load() -> tuple[Generate, dict[str, Any]]:
    folder, threads = sys.argv[1], int(sys.argv[2])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GIB
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def generate(prompts: TokenIds, max_tokens: int) -> Sequence[int]:
        config = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        return [len(result.m_generation_ids[0]) for result in results]

    settings = {
        "version": openvino_genai.__version__,
        "threads": threads,
        "weights": "int8",
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }
    return generate, settings


if __name__ == "__main__":
    serve(_load)
