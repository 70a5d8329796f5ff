"""What the NCCL plane asks of a device: all that needs one is behind this seam. `nccl_library` implements it with cupy.

Every method may block for as long as a peer takes and is called off the event loop. What goes wrong is a TransferError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

TOKEN_BYTES: Final = 16
READER_RANK: Final = 0
OWNER_RANK: Final = 1
# NCCL takes no more than 2,048 operations in a group (its user guide, "Group Calls"); a row that a rank sends to itself is two.
MAX_GROUP_ROWS: Final = 1024
GROUP_BYTES: Final = 32 * 2**20  # that a reader asks for at once: what a cancel waits for


@dataclass(frozen=True, slots=True)
class NcclPool:
    """What a reader needs to know of an owner's pool."""

    num_blocks: int
    block_bytes: int
    version: int  # of the owner's NCCL: it does not promise to understand another one
    token: bytes  # comes first over every communicator: whatever has joined it is this owner


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor, in the order in which they travel."""

    tensor: torch.Tensor  # uint8 `[num_rows, row_bytes]`, contiguous, in the device's memory
    indexes: Sequence[int]


class Communicator(Protocol):
    """One rank of a communicator of two, or of one that sends to itself."""

    def post(self, *, send: Rows | None = None, receive: Rows | None = None) -> object:
        """Starts one group, after those that were started before. The other rank must post its counterpart, row by row, in the same
        order; the first group waits here until it does. The result is for `is_done`.
        """

    def is_done(self, group: object) -> bool:
        """Whether all rows of the group have arrived, or have left.

        Raises:
            TransferError: the communicator is broken, as by the other rank's end.
        """

    def abort(self) -> None:
        """Ends everything that was posted; nothing of it reads or writes memory once this has returned. Idempotent. May be called while
        another thread is in a call that does not come back.
        """


class Device(Protocol):
    """One device of this process, with NCCL on it."""

    @property
    def version(self) -> int:
        """Of NCCL, as its `ncclGetVersion` has it: 22703 is 2.27.3."""

    def unique_id(self) -> bytes:
        """A name for a communicator that is to be; the other rank reaches this process by it. NCCL keeps a thread and a socket until all
        ranks have joined, so draw none that nobody will use.
        """

    def join(self, unique_id: bytes, rank: int, num_ranks: int = 2) -> Communicator:
        """Waits, without a limit, until all ranks have joined."""
