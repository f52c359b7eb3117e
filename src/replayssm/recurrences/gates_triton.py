"""Activations of gates in fp32, for the recurrences' Triton forms."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x), linear above 20, and to the last digits below 0, where 1 + e^x alone would lose them."""
    small = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + small
    # the error of the rounded sum cancels in the quotient
    close = tl.where(above == 1.0, small, tl.log(above) * (small / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(x > 20.0, x, close)
