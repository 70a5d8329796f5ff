"""What C++ relies on in tensors that it only gets the addresses of."""

from __future__ import annotations

import torch
from torch import Tensor


def check_rows(name: str, x: Tensor, num_rows: int, num_columns: int) -> None:
    """
    Raises:
        ValueError: `x` is not float32 `[num_rows, num_columns]` on the CPU with each row in one piece; names it.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.shape != (num_rows, num_columns):
        raise ValueError(f"{name}: {x.dtype} {list(x.shape)} on {x.device} is not float32 [{num_rows}, {num_columns}] on cpu")
    if x.stride(1) != 1 or (num_rows > 1 and x.stride(0) < num_columns):
        raise ValueError(f"{name}: strides {x.stride()} are not those of rows in one piece each")


def check_contiguous(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """
    Raises:
        ValueError: `x` is not contiguous, of this dtype and shape, on the CPU; names it.
    """
    if x.dtype != dtype or x.device.type != "cpu" or x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name}: {x.dtype} {list(x.shape)} on {x.device} is not contiguous {dtype} {list(shape)} on cpu")


def check_vector(name: str, x: Tensor, length: int) -> None:
    """
    Raises:
        ValueError: `x` is not contiguous float32 `[length]` on the CPU; names it.
    """
    check_contiguous(name, x, torch.float32, (length,))


def check_range(name: str, x: Tensor, low: int, high: int) -> None:
    """Of integers.

    Raises:
        ValueError: a value is not in `[low, high)`; names it.
    """
    if x.numel() == 0:
        return
    least, greatest = x.aminmax()
    if int(least) < low or int(greatest) >= high:
        raise ValueError(f"{name}: {int(least)}…{int(greatest)} is not in {low}…{high - 1}")


def check_indexes(name: str, x: Tensor, dtype: torch.dtype, length: int, *, low: int = 0, high: int) -> None:
    """
    Raises:
        ValueError: `x` is not contiguous `[length]` of this dtype with values in `[low, high)`; names it.
    """
    check_contiguous(name, x, dtype, (length,))
    check_range(name, x, low, high)
