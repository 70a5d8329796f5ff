"""What grpc.aio's stubs leave out of streams in both directions."""

from __future__ import annotations

from typing import Any, Final

from grpc import aio

END_OF_STREAM: Final[object] = aio.EOF  # type: ignore[attr-defined]  # what a read gives when the other side has sent all


def open_stream(method: Any, metadata: tuple[tuple[str, str], ...]) -> Any:
    """A call of `method`, a stub's, whose requests are written one by one: an `aio.StreamStreamCall`."""
    return method(metadata=metadata)
