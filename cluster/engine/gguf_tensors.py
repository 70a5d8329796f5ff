"""Reads a GGUF file's tensors without its vocabulary: the package's own reader makes arrays of every token, which takes longer than
building a small model from the weights.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
from gguf import GGUFReader, GGUFValueType

_LENGTH_BYTES: Final = 8
_ARRAY_HEADER_BYTES: Final = 4 + _LENGTH_BYTES  # the items' type, their number


class GgufTensors(GGUFReader):
    """`tensors` and single values as in `GGUFReader`; fields that hold arrays have no content."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        num_items = int(self._get(orig_offs + 4, np.uint64)[0])
        num_bytes = self._array_bytes(orig_offs + _ARRAY_HEADER_BYTES, item_type, num_items)
        return _ARRAY_HEADER_BYTES + num_bytes, [], [], [GGUFValueType.ARRAY, item_type]

    def _array_bytes(self, start: int, item_type: GGUFValueType, num_items: int) -> int:
        scalar = self.gguf_scalar_to_np.get(item_type)
        if scalar is not None:
            return num_items * np.dtype(scalar).itemsize
        if item_type != GGUFValueType.STRING:
            raise ValueError(f"arrays of {item_type.name} are not supported")
        order: Literal["big", "little"] = "big" if self.byte_order == "S" else "little"
        buffer, end = memoryview(self.data), start  # type: ignore[arg-type]  # an array is a buffer
        for _ in range(num_items):
            if end >= len(buffer):
                raise ValueError("the file ends within an array")
            end += _LENGTH_BYTES + int.from_bytes(buffer[end : end + _LENGTH_BYTES], order)
        return end - start
