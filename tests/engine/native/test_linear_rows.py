"""Promise P0 in the kernels: a row's bits are the same alone, in any batch, at any place in it, and with any number of threads."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.engine.native.activations import apply
from tests.engine.native.formats import FORMATS, make, random

MAX_ROWS = 70


def cancelling(rows: int, columns: int, *, is_weight: bool) -> Tensor:
    """Products of such rows with such weights nearly sum to zero, so that another order of a sum shows."""
    half = random(rows, columns // 2, seed=int(is_weight))
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return torch.cat([half, -half if is_weight else half], dim=1)[:, order].contiguous()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 97), (1536, 64), (96, 33)])
def test_any_number_of_rows(isa: str, name: str, in_features: int, out_features: int) -> None:
    linear = make(name, cancelling(out_features, in_features, is_weight=True)).linear
    x = cancelling(MAX_ROWS, in_features, is_weight=False)
    whole = apply(linear, x)
    for number in range(1, MAX_ROWS + 1):
        for first in {0, (MAX_ROWS - number) // 2, MAX_ROWS - number}:
            assert torch.equal(apply(linear, x[first : first + number]), whole[first : first + number]), f"{number} rows from {first}"


@pytest.mark.parametrize("name", FORMATS)
def test_every_row_alone(isa: str, name: str) -> None:
    linear = make(name, cancelling(97, 576, is_weight=True), random(97)).linear
    x = cancelling(130, 576, is_weight=False)
    assert torch.equal(torch.cat([apply(linear, row[None]) for row in x]), apply(linear, x))


@pytest.mark.parametrize("name", FORMATS)
def test_any_number_of_threads(native: ModuleType, isa: str, name: str) -> None:
    linear = make(name, cancelling(1000, 576, is_weight=True)).linear
    x = cancelling(MAX_ROWS, 576, is_weight=False)
    alone = [apply(linear, x[:number]) for number in (1, 9, MAX_ROWS)]
    try:
        for num_threads in (2, 3, 2):
            native.set_num_threads(num_threads)
            assert native.num_threads() == num_threads
            for _ in range(20):
                assert all(torch.equal(apply(linear, x[: len(y)]), y) for y in alone)
    finally:
        native.set_num_threads(1)


def test_rows_at_any_distance(isa: str) -> None:
    for name in FORMATS:
        linear = make(name, random(40, 64)).linear
        wide = random(19, 200, seed=3)
        assert torch.equal(apply(linear, wide[:, 5:69]), apply(linear, wide[:, 5:69].contiguous()))


def test_settings_that_cannot_be_are_refused(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        native.set_num_threads(0)
    with pytest.raises(ValueError, match="sse2"):
        native.set_isa("sse2")
