"""The live sequences of an engine by status, each list in order (promise P4)."""

from __future__ import annotations

import bisect
from heapq import merge

from cluster.engine.sequence import Sequence, SequenceStatus
from cluster.types import OrderKey

_QUEUED = frozenset({SequenceStatus.WAITING, SequenceStatus.PREEMPTED})


def in_order(sequence: Sequence) -> tuple[OrderKey, str]:
    """The key that sorts sequences."""
    return sequence.order


class Roster:
    """Three lists; every live sequence is in the one of its status."""

    def __init__(self) -> None:
        self.running: list[Sequence] = []
        self.queued: list[Sequence] = []  # waiting or preempted
        self.waiting_for_kv: list[Sequence] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All of them, in no order."""
        return [*self.running, *self.queued, *self.waiting_for_kv]

    @property
    def preempted(self) -> list[Sequence]:
        return [sequence for sequence in self.queued if sequence.status is SequenceStatus.PREEMPTED]

    @property
    def holders(self) -> list[Sequence]:
        """Those with blocks, in order."""
        return list(merge(self.running, self.preempted, self.waiting_for_kv, key=in_order))

    @property
    def num_seated(self) -> int:
        """Sequences that count against `max_num_seqs`."""
        return len(self.running) + len(self.waiting_for_kv)

    def place(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Puts a sequence, new or listed, into the list of `status`."""
        self.remove(sequence)
        sequence.status = status
        bisect.insort(self._list_of(status), sequence, key=in_order)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence off its list. Nothing happens when it is on none."""
        sequences = self._list_of(sequence.status)
        if sequence in sequences:
            sequences.remove(sequence)

    def _list_of(self, status: SequenceStatus) -> list[Sequence]:
        if status in _QUEUED:
            return self.queued
        return self.running if status is SequenceStatus.RUNNING else self.waiting_for_kv

    def check_integrity(self) -> None:
        """Raises AssertionError unless every list is in order and holds only its own statuses."""
        lists = (
            (self.running, {SequenceStatus.RUNNING}),
            (self.queued, _QUEUED),
            (self.waiting_for_kv, {SequenceStatus.WAITING_FOR_KV}),
        )
        for sequences, statuses in lists:
            assert sequences == sorted(sequences, key=in_order), "a list is out of order"
            assert all(sequence.status in statuses for sequence in sequences), "a sequence is in the wrong list"
