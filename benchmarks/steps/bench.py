"""One worker's engine alone: requests in, real steps, a sample of time for each."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.steps.case import Case, DecodeCase
from benchmarks.steps.cost import CostModel, StepCost
from benchmarks.steps.measured_kernels import MeasuredKernels
from cluster.config import EngineConfig
from cluster.engine.build import build_engine
from cluster.engine.events import EngineEvent, Failed, Token
from cluster.engine.kernel_choice import choose_kernels
from cluster.engine.model_build import kv_layout
from cluster.errors import ConfigError, InternalError
from cluster.model_config import ModelConfig
from cluster.types import OrderKey, Request, SamplingParams, TokenOutput


@dataclass(frozen=True, slots=True)
class Sample:
    """One decode step, or one prompt."""

    duration_s: float  # of `Engine.step`, scheduling and sampling included
    kernels_s: float  # of it, inside decoder and head
    cost: StepCost


class EngineBench:
    """An engine with room for the cases, which run one at a time: `start`, `sample` as often as promised, `finish`."""

    def __init__(self, config: EngineConfig, folder: Path, cases: Sequence[Case], num_samples: int) -> None:
        """Loads the model: seconds for small ones.

        Args:
            config: of the pool; its limits grow where the cases need more.
            folder: of the model.
            cases: that will run.
            num_samples: the most that any of them will be asked for.

        Raises:
            ConfigError: as `build_engine`, or a case is longer than the model's context.
        """
        model_config = ModelConfig.load(folder)
        longest = max(tokens + 1 for case in cases for tokens in case.num_held_tokens(num_samples))
        if longest > model_config.max_position_embeddings:
            raise ConfigError(f"a sequence would get {longest} tokens, the model's context has {model_config.max_position_embeddings}")
        self._kernels = MeasuredKernels(choose_kernels(config, model_config))
        layout = kv_layout(config, model_config, self._kernels.packing)
        num_blocks = max(sum(layout.num_blocks_for(tokens + 1) for tokens in case.num_held_tokens(num_samples)) for case in cases)
        most_seqs = max(len(case.num_held_tokens(num_samples)) for case in cases)
        fitted = config.model_copy(
            update={
                "kv_cache_bytes": max(config.kv_cache_bytes, int(num_blocks / (1 - config.reserve_fraction) + 2) * layout.block_bytes),
                "max_num_seqs": max(config.max_num_seqs, most_seqs),
                "max_num_batched_tokens": max(config.max_num_batched_tokens, most_seqs),
            }
        )
        self._engine = build_engine(fitted, folder, kernels=self._kernels)
        self._costs = CostModel(model_config, layout, self._kernels.decoder_weights, self._kernels.head_weights)
        self._num_samples = num_samples
        self._random = random.Random(0)
        self._num_requests = 0
        self._case: Case | None = None
        self._keys: list[str] = []

    @property
    def domain(self) -> str:
        """Of the engine: scheme, KV, kernels."""
        return self._engine.domain

    @property
    def kernels_name(self) -> str:
        return self._kernels.name

    def start(self, case: Case) -> None:
        """Prepares a case. Contexts of decode are zeros that are there, as if another worker had computed and sent them."""
        self._case = case
        if isinstance(case, DecodeCase):
            for _ in range(case.batch):
                request = self._request(case.context, self._num_samples + 2)
                if self._engine.reserve(request, self._engine.domain, case.context) is None:
                    raise InternalError(f"{case}: no room for {request.key}")
                self._engine.start(request.key, TokenOutput(self._token_id()))
                self._keys.append(request.key)

    def sample(self) -> Sample:
        """Runs one step of all sequences, or one prompt.

        Raises:
            InternalError: the step failed, or did not what the case says.
        """
        case = self._case
        assert case is not None
        if not isinstance(case, DecodeCase):
            self._engine.add(self._request(case.num_tokens, 1), stop_after_first_token=False)
        self._kernels.reset()
        started_s = time.perf_counter()
        num_sampled = self._step()
        while num_sampled == 0:
            num_sampled = self._step()
        duration_s = time.perf_counter() - started_s
        cost = sum(map(self._costs.step, self._kernels.batches), StepCost())
        num_computed = sum(batch.num_tokens for batch in self._kernels.batches)
        if num_computed != case.num_tokens:
            raise InternalError(f"{case}: {num_computed} tokens were computed")
        return Sample(duration_s, self._kernels.inside_s, cost)

    def finish(self) -> None:
        """Ends the case's sequences."""
        for key in self._keys:
            self._engine.abort(key)
        self._keys = []
        self._engine.forget_cached_blocks()

    def _step(self) -> int:
        """How many tokens it sampled."""
        events = [event for _, event in self._engine.step()]
        if not self._kernels.batches or any(isinstance(event, Failed) for event in events):
            raise InternalError(f"{self._case}: the step failed: {_failures(events)}")
        return sum(isinstance(event, Token) for event in events)

    def _request(self, num_tokens: int, max_tokens: int) -> Request:
        """Random tokens, so that no prefix is found."""
        self._num_requests += 1
        prompt = tuple(self._token_id() for _ in range(num_tokens))
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        return Request(f"bench-{self._num_requests}", 0, prompt, sampling, OrderKey(0.0, self._num_requests))

    def _token_id(self) -> int:
        return self._random.randrange(self._engine.identity.vocab_size)


def _failures(events: Sequence[EngineEvent]) -> str:
    return ", ".join(event.message for event in events if isinstance(event, Failed)) or "nothing was run"
