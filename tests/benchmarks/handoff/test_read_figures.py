"""What is made of the samples of a wire."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.handoff.read_figures import HEADER, Reads, Sample

MIB = 2**20
# The machine slows down fourfold in the second half: medians of times would pair a fast read with a slow copy.
SAMPLES = (
    Sample(read_s=0.01, copy_s=0.008, bare_s=0.009, reader_cpu_s=0.01, owner_cpu_s=0.0),
    Sample(read_s=0.02, copy_s=0.016, bare_s=0.018, reader_cpu_s=0.02, owner_cpu_s=0.01),
    Sample(read_s=0.05, copy_s=0.040, bare_s=0.045, reader_cpu_s=0.05, owner_cpu_s=0.01),
)
READS = Reads("nixl", block_size=32, block_bytes=MIB, num_blocks=16, samples=SAMPLES)


def test_rates_are_of_the_median_time() -> None:
    assert READS.num_bytes == 16 * MIB
    assert READS.gb_per_s == pytest.approx(16 * MIB / 0.02 / 1e9)
    assert READS.copy_gb_per_s == pytest.approx(16 * MIB / 0.016 / 1e9)
    assert READS.bare_gb_per_s == pytest.approx(16 * MIB / 0.018 / 1e9)
    assert READS.us_per_block == pytest.approx(0.02 / 16 * 1e6)


def test_ratios_are_taken_within_a_sample() -> None:
    assert READS.of_copy == pytest.approx(0.8)
    assert READS.of_bare == pytest.approx(0.9)
    last = dataclasses.replace(SAMPLES[2], copy_s=0.05)
    assert dataclasses.replace(READS, samples=(*SAMPLES[:2], last)).of_copy == pytest.approx(0.8), "the median, not the mean"


def test_cpu_shares_are_of_all_reads_together() -> None:
    assert READS.reader_cpu_share == pytest.approx(1.0)
    assert READS.owner_cpu_share == pytest.approx(0.02 / 0.08)


def test_without_nixl_there_is_nothing_bare() -> None:
    reads = dataclasses.replace(READS, samples=tuple(dataclasses.replace(sample, bare_s=None) for sample in SAMPLES))
    assert reads.bare_gb_per_s is None and reads.of_bare is None
    assert reads.row()[-2:] == ["-", "-"]
    assert reads.record()["of_bare"] is None


def test_row_and_record_have_all_figures() -> None:
    assert len(READS.row()) == len(HEADER)
    assert READS.row()[:3] == ["nixl", "32 (1024 KiB)", "16.0 MiB"]
    record = READS.record()
    assert record["of_bare"] == 0.9 and record["block_size"] == 32 and "samples" not in record
