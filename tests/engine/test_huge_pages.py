"""Memory on huge pages."""

from __future__ import annotations

import pytest
import torch

from cluster.engine import huge_pages
from cluster.engine.huge_pages import huge_page_zeros


def test_tensors_are_aligned_zeroed_and_apart() -> None:
    parts = [huge_page_zeros(size) for size in (1, 65, 4096, 40 << 20, 1000)]
    for value, part in enumerate(parts, start=1):
        assert part.data_ptr() % 64 == 0 and not part[:4096].any()
        part.fill_(value)
    assert all((part == value).all() for value, part in enumerate(parts, start=1))
    assert huge_page_zeros(0).numel() == 0


def test_memory_taken_in_inference_mode_can_be_written_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is built in that mode; the rest of its mapping serves others."""
    monkeypatch.setattr(huge_pages, "_ARENA", huge_pages._Arena())
    with torch.inference_mode():
        huge_page_zeros(64).fill_(1)
    huge_page_zeros(64).fill_(2)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_bytes"):
        huge_page_zeros(-1)
