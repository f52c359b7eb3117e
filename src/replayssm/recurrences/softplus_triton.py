"""softplus as torch computes it, for kernels that turn raw gates into steps and decays."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + e^x), x itself above 20. For small e^x the sum with 1 rounds it away: the quotient puts that right."""
    e = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + e
    exact = tl.where(whole == 1.0, e, tl.log(whole) * (e / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.where(x > 20.0, x, exact)
