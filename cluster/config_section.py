"""What the sections of the configuration have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A part of the configuration: it knows all its keys and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def misfit(key: str, message: str) -> PydanticCustomError:
    """For values that are good by themselves but not together; `key` is relative to the section that finds out."""
    return PydanticCustomError("misfit", "{message}", {"message": message, "key": key})
