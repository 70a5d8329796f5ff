"""The figures of reads over one wire."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

HEADER: Final = (
    *("wire", "block", "read", "GB/s", "us a block", "reader CPU", "owner CPU"),
    *("copy GB/s", "of copy", "READ GB/s", "of READ"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A read, and what followed it at once: a copy and a bare READ of as many bytes."""

    read_s: float
    copy_s: float
    bare_s: float | None  # None: NIXL is not there
    reader_cpu_s: float  # used by the whole process during the read
    owner_cpu_s: float


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads of one size over one wire. Ratios are taken within a sample, and their median counts: a shared machine's speed drifts."""

    wire: str
    block_size: int  # tokens
    block_bytes: int
    num_blocks: int  # of one read; each is one descriptor
    samples: tuple[Sample, ...]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self._median(lambda sample: sample.read_s) / 1e9

    @property
    def copy_gb_per_s(self) -> float:
        return self.num_bytes / self._median(lambda sample: sample.copy_s) / 1e9

    @property
    def bare_gb_per_s(self) -> float | None:
        bare = [sample.bare_s for sample in self.samples if sample.bare_s is not None]
        return self.num_bytes / statistics.median(bare) / 1e9 if bare else None

    @property
    def us_per_block(self) -> float:
        return self._median(lambda sample: sample.read_s) / self.num_blocks * 1e6

    @property
    def of_copy(self) -> float:
        """The read's rate over the copy's."""
        return self._median(lambda sample: sample.copy_s / sample.read_s)

    @property
    def of_bare(self) -> float | None:
        """The read's rate over the bare READ's."""
        ratios = [sample.bare_s / sample.read_s for sample in self.samples if sample.bare_s is not None]
        return statistics.median(ratios) if ratios else None

    @property
    def reader_cpu_share(self) -> float:
        """CPU time over time, of all reads together; above 1 where several threads work."""
        return self._share(lambda sample: sample.reader_cpu_s)

    @property
    def owner_cpu_share(self) -> float:
        return self._share(lambda sample: sample.owner_cpu_s)

    def row(self) -> list[str]:
        """Of the table with `HEADER`."""
        bare, of_bare = self.bare_gb_per_s, self.of_bare
        return [
            self.wire,
            f"{self.block_size} ({self.block_bytes / 2**10:.0f} KiB)",
            f"{self.num_bytes / 2**20:.1f} MiB",
            f"{self.gb_per_s:.2f}",
            f"{self.us_per_block:.0f}",
            f"{self.reader_cpu_share:.0%}",
            f"{self.owner_cpu_share:.0%}",
            f"{self.copy_gb_per_s:.2f}",
            f"{self.of_copy:.0%}",
            "-" if bare is None else f"{bare:.2f}",
            "-" if of_bare is None else f"{of_bare:.0%}",
        ]

    def record(self) -> dict[str, Any]:
        """For the line of JSON."""
        derived = ("num_bytes", "gb_per_s", "us_per_block", "reader_cpu_share", "owner_cpu_share")
        ratios = ("copy_gb_per_s", "of_copy", "bare_gb_per_s", "of_bare")
        found = {name: getattr(self, name) for name in (*derived, *ratios)}
        head = {key: value for key, value in asdict(self).items() if key != "samples"}
        return {**head, **{name: None if value is None else float(f"{value:.4g}") for name, value in found.items()}}

    def _median(self, of: Callable[[Sample], float]) -> float:
        return statistics.median(map(of, self.samples))

    def _share(self, of: Callable[[Sample], float]) -> float:
        return sum(map(of, self.samples)) / sum(sample.read_s for sample in self.samples)
