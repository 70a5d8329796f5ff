"""Randomness as a function of (seed, choice, position, token id) (promise P7): no generator, no state, so a token is the same after a hop,
a preemption or in another batch.

The maximum of `logits / temperature + gumbel` is a draw from the softmax. The noise of one token comes from a 32-bit hash of its id under a
64-bit key of (seed, choice, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_MASK64: Final = 2**64 - 1


def noise_key(seed: int, choice: int, position: int) -> int:
    """64 bits; every input bit reaches every output bit (splitmix64 over the three)."""
    state = 0
    for part in (seed, choice, position):
        state = _mix64((state ^ part) & _MASK64)
    return state


def gumbel(keys: Sequence[int], num_tokens: int) -> Tensor:
    """Standard Gumbel noise, float32 `[len(keys), num_tokens]`: finite, each row a function of its key alone."""
    words = torch.tensor([[_signed(key >> 32), _signed(key & 0xFFFFFFFF)] for key in keys], dtype=torch.int32)
    ids = torch.arange(num_tokens, dtype=torch.int32)
    bits = _mix32(ids * _signed(0x9E3779B1) + words[:, :1])
    bits = _mix32(bits.bitwise_xor_(words[:, 1:]))
    # 31 bits as a small float keep their precision near 0, where the exponential is small and the noise large.
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_max_(1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(bits: Tensor) -> Tensor:
    """An integer hash with little bias, in place. The masks make torch's arithmetic shifts logical."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def _mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _signed(word: int) -> int:
    """The int32 with the bits of a uint32."""
    return word - 2**32 if word >= 2**31 else word
