"""Codes of 4 or 8 bits, packed into 32-bit words along the key rows.

A word holds consecutive key rows of one column, so that a kernel loads words of neighbouring columns together and
takes them apart with shifts, and every code of a word has the same block scale. With C codes in a word, blocks of S
key rows and NB blocks in a column, code c of word row r, counted from the low bits, stands for key row

    (r % NB) * S + (r // NB) * C + c

Blocks are interleaved, so that whichever thread of a kernel holds a word holds the others of its block as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def pack(codes: Tensor, bits: int, block: int) -> Tensor:
    """Words int32 [..., N * bits / 32, P] of integer codes [..., N, P] in 0..2^bits - 1, N a multiple of `block`."""
    in_word = WORD_BITS // bits
    codes = codes.int().unflatten(-2, (-1, block // in_word, in_word)).transpose(-4, -3).flatten(-4, -3)
    words = codes[..., 0, :].clone()
    for c in range(1, in_word):
        words |= codes[..., c, :] << bits * c
    return words


def unpack(words: Tensor, bits: int, block: int) -> Tensor:
    """The codes int32 [..., N, P] that were packed."""
    in_word = WORD_BITS // bits
    codes = torch.stack([words >> bits * c & (1 << bits) - 1 for c in range(in_word)], -2)
    return codes.unflatten(-3, (block // in_word, -1)).transpose(-4, -3).flatten(-4, -2)


def word_rows(keys: int, bits: int, block: int, name: str) -> int:
    """Word rows of a column of `keys` key rows.

    Raises:
        ValueError: the last block would not be full.
    """
    if keys % block:
        raise ValueError(f"{name} keeps key rows in blocks of {block}, and key_dim {keys} is not a multiple of it")
    return keys * bits // WORD_BITS
