"""Runs a model step by step without a scheduler: sequences with scattered blocks, any chunking, any batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from cluster.config import EngineConfig
from cluster.engine.forward_batch import ForwardBatch
from cluster.engine.model_build import BuiltModel, build_model
from cluster.engine.runner import ModelRunner
from cluster.engine.sequence import ScheduledSequence, Sequence
from cluster.types import OrderKey, Request, SamplingParams, TokenOutput

NUM_BLOCKS = 160


def engine_config(scheme: str, *, kernels: str = "native", block_size: int = 16) -> EngineConfig:
    kv_dtype = "float32" if scheme == "float32" else "bf16"
    return EngineConfig.model_validate({"scheme": scheme, "kv_dtype": kv_dtype, "kernels": kernels, "block_size": block_size})


class ModelDrive:
    """A built model, its pool, and blocks given out in a random order and never taken back."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self.built: BuiltModel = build_model(config, folder)
        storage = torch.zeros(NUM_BLOCKS, self.built.layout.block_bytes, dtype=torch.uint8)
        self.cache = self.built.make_cache(storage)
        self.runner = ModelRunner(self.built.model, self.cache)
        self._free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()

    def sequence(self, prompt: Seq[int], *, max_tokens: int = 1, **sampling: object) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens, **({"seed": 1, "temperature": 0.0, "ignore_eos": True} | sampling))  # type: ignore[arg-type]
        request = Request("r", 0, tuple(prompt), params, OrderKey(0.0, 0))
        num_tokens = len(prompt) + max_tokens
        num_blocks = self.built.layout.num_blocks_for(num_tokens)
        sequence = Sequence(request, max_num_tokens=num_tokens, max_num_blocks=num_blocks, stops_at_first_token=False, prefix=None)
        sequence.block_table = [self._free.pop() for _ in range(num_blocks)]
        return sequence

    def logits(self, sequences: Seq[Sequence], num_tokens: Seq[int]) -> torch.Tensor | None:
        """One step over the next `num_tokens[i]` tokens of each; `[num_samples, vocab_size]` of those that reach their end."""
        scheduled = [ScheduledSequence(sequence, number) for sequence, number in zip(sequences, num_tokens, strict=True)]
        batch = ForwardBatch.build(scheduled, self.built.layout.block_size)
        with torch.inference_mode():
            logits = self.built.model.forward(batch, self.cache)
        for item in scheduled:
            item.sequence.num_computed_tokens += item.num_scheduled_tokens
        return logits

    def generate(self, sequences: Seq[Sequence], *, chunk: int) -> list[list[TokenOutput]]:
        """All sequences in one batch until each has its `max_tokens`; prompts in chunks of at most `chunk`."""
        outputs: list[list[TokenOutput]] = [[] for _ in sequences]
        while True:
            live = [i for i, s in enumerate(sequences) if s.num_output_tokens < s.request.sampling.max_tokens]
            if not live:
                return outputs
            scheduled = [ScheduledSequence(sequences[i], min(chunk, sequences[i].num_uncomputed_tokens)) for i in live]
            for i, item, output in zip(live, scheduled, self.runner.run(scheduled), strict=True):
                item.sequence.num_computed_tokens += item.num_scheduled_tokens
                if output is not None:
                    outputs[i].append(output)
                    sequences[i].token_ids.append(output.token_id)
