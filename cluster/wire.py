"""msgpack for the frozen dataclasses that cross processes (tickets, reports, placements).

Decoding validates against the dataclass, so that what comes off a wire is either the type it claims or a `WireError`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgpack
from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


class WireError(ValueError):
    """Bytes from another process are not what they should be."""


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}  # building one costs a millisecond


def _adapter(cls: Any) -> TypeAdapter[Any]:
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def encode(value: Any) -> bytes:
    """A frozen dataclass as msgpack bytes. Enums must be `StrEnum`, so that they pack as text."""
    # `asdict` would give the same and takes many times as long, and a ticket is packed several times between two tokens.
    packed: bytes = msgpack.packb(_adapter(type(value)).dump_python(value, warnings="none"))
    return packed


def decode(cls: type[T], data: bytes) -> T:
    """The `cls` that `encode` packed.

    Raises:
        WireError: not msgpack, or not a `cls`.
    """
    try:
        value = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not a {cls.__name__}: {error}") from error
    return validated(cls, value)


def validated(cls: type[T], value: object) -> T:
    """The `cls` that was plain values, as JSON gives them too.

    Raises:
        WireError: not a `cls`.
    """
    try:
        found: T = _adapter(cls).validate_python(value)
    except ValidationError as error:
        raise WireError(f"not a {cls.__name__}: {error}") from error
    return found
