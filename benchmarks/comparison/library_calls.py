"""The parts that call libraries: one engine against peers, case by case."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.comparison.alternation import Outcome, alternate
from benchmarks.comparison.cases import Case
from benchmarks.comparison.failure import PeerError
from benchmarks.comparison.runner_process import RunnerProcess
from benchmarks.report import progress

CALL_TIMEOUT_S: Final = 600.0
_WARM_UP_TOKENS: Final = 4
_WARM_UP_SEED: Final = -1
_SETTLE_S: Final = 0.3  # threads of the one before spin on for a while after their last work


@dataclass(frozen=True, slots=True)
class LibraryCalls:
    """Calls of loaded contestants."""

    runners: Mapping[str, RunnerProcess]
    seed: int  # of the first round; each round has prompts of its own, the same for all

    def compare(self, case: Case, names: Sequence[str], num_rounds: int) -> Outcome:
        """Warms everybody up for the case, then alternates. Figures are tokens/s."""
        progress(str(case))
        failed = self.warm_up(case, names)
        outcome = alternate([name for name in names if name not in failed], num_rounds, lambda name, index: self.rate(name, case, index))
        outcome.errors.update(failed)
        return outcome

    def warm_up(self, case: Case, names: Sequence[str]) -> dict[str, str]:
        """First calls of a shape allocate, pack and compile; whoever fails at it, and why."""
        failed: dict[str, str] = {}
        for name in names:
            try:
                self.runners[name].run(case.prompts(_WARM_UP_SEED), min(_WARM_UP_TOKENS, case.num_output_tokens), CALL_TIMEOUT_S)
            except PeerError as error:
                progress(f"{name}: {error}")
                failed[name] = str(error)
        return failed

    def rate(self, name: str, case: Case, index: int) -> float:
        """Tokens/s of one call with the prompts of round `index`.

        Raises:
            PeerError: see `RunnerProcess.run`.
        """
        time.sleep(_SETTLE_S)
        sample = self.runners[name].run(case.prompts(self.seed + index), case.num_output_tokens, CALL_TIMEOUT_S)
        rate = case.num_counted / sample.duration_s
        progress(f"{case.name}, round {index + 1}: {name} {rate:.1f} tokens/s")
        return rate
