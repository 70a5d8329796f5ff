"""Which faults strike, and how often: the config's section `fault_injection`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from cluster.config_section import Section, misfit
from cluster.faults.points import FaultAction, FaultPoint


class FaultRule(Section):
    """Faults at one point. Of the passages after the first `after`, each `every`th is struck with `probability`, `max_count` in all."""

    point: FaultPoint
    action: FaultAction
    probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    every: Annotated[int, Field(ge=1)] = 1
    after: Annotated[int, Field(ge=0)] = 0
    max_count: Annotated[int, Field(ge=1)] | None = None
    delay_s: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> FaultRule:
        if self.action not in self.point.actions:
            raise misfit("action", f"{self.action} makes no sense at {self.point}; there are {', '.join(sorted(self.point.actions))}")
        if (self.action is FaultAction.DELAY) != (self.delay_s is not None):
            raise misfit("delay_s", "goes with action delay, and only with it")
        return self

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.model_dump(mode="json", exclude_defaults=True).items())


class FaultInjectionConfig(Section):
    """Faults on purpose, to see what becomes of requests. As text, the warning that they are on."""

    seed: int = Field(0, description="of the faults' chances; each worker has its own")
    rules: tuple[FaultRule, ...] = Field(
        (), description="what goes wrong where: see [Break it yourself](#break-it-yourself); none: nothing is injected"
    )

    def __str__(self) -> str:
        return f"FAULT INJECTION IS ON: {'; '.join(map(str, self.rules))}"
