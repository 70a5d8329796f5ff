"""Runs one step: scheduled sequences → batch → model → sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.engine.forward_batch import ForwardBatch
from cluster.engine.interrupt import Interrupt
from cluster.engine.kv_cache import KVCache
from cluster.engine.logits_processor import SampleRow
from cluster.engine.model import Model
from cluster.engine.sampler import Sampler
from cluster.engine.sequence import ScheduledSequence
from cluster.types import TokenOutput


class ModelRunner:
    """The engine's way to its model. Reads sequences, changes none."""

    def __init__(self, model: Model, kv_cache: KVCache) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._sampler = Sampler(model.config.eos_token_ids)

    @property
    def interrupt(self) -> Interrupt:
        """Ends the running step early."""
        return self._model.interrupt

    @torch.inference_mode()
    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[TokenOutput | None]:
        """Computes the KV of the scheduled tokens.

        Returns:
            for each sequence, the token sampled after its last known one, or None where the step does not reach that.

        Raises:
            StepInterrupted: `interrupt` was set.
        """
        batch = ForwardBatch.build(scheduled, self._kv_cache.layout.block_size)
        logits = self._model.forward(batch, self._kv_cache)
        if logits is None:
            return [None] * len(scheduled)
        outputs = iter(self._sampler.sample(logits, [_sample_row(item) for item in scheduled if item.samples]))
        return [next(outputs) if item.samples else None for item in scheduled]


def _sample_row(item: ScheduledSequence) -> SampleRow:
    sequence = item.sequence
    return SampleRow(sequence.request.sampling, sequence.token_ids, sequence.num_prompt_tokens)
