"""Block tables of a step's decode rows, in arrays that live from step to step: most rows change only once a block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.engine.forward_batch import BatchSpan


class DecodeTables:
    """int32 `[num_rows, num_columns]` and context lengths, int32 `[num_rows]`, as addresses, which hold until the next `fill`."""

    def __init__(self) -> None:
        self._make_room(0, 0)

    def fill(self, spans: Sequence[BatchSpan], num_blocks: int) -> None:
        """Row by row from `spans`, of one token each. What lies behind a row's last block, nobody reads.

        Raises:
            ValueError: a block is none of the `num_blocks` of the pool.
        """
        num_columns = max((len(span.block_ids) for span in spans), default=0)
        if len(spans) > len(self._written) or num_columns > self.num_columns:
            self._make_room(max(len(spans), 2 * len(self._written)), max(num_columns, 2 * self.num_columns))
        for row, span in enumerate(spans):
            if span.block_ids != self._written[row]:
                if min(span.block_ids) < 0 or max(span.block_ids) >= num_blocks:
                    raise ValueError(f"block_ids: {span.block_ids} are not all in 0…{num_blocks - 1}")
                self._tables[row, : len(span.block_ids)] = span.block_ids
                self._written[row] = span.block_ids
        self._context_lens[: len(spans)] = [span.end for span in spans]

    def _make_room(self, num_rows: int, num_columns: int) -> None:
        self._tables = np.zeros((num_rows, num_columns), dtype=np.int32)
        self._context_lens = np.zeros(num_rows, dtype=np.int32)
        self._written: list[tuple[int, ...]] = [()] * num_rows
        self.num_columns = num_columns
        self.tables_address: int = self._tables.ctypes.data
        self.context_lens_address: int = self._context_lens.ctypes.data
