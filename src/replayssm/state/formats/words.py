"""Codes of 4 or 8 bits, packed into 32-bit words along the key rows.

A word holds consecutive key rows of one column, so that a kernel loads words of neighbouring columns together and
takes them apart with shifts, and every code of a word has the same block scale. With C codes in a word, blocks of S
key rows and NB blocks in a column, code c of word row r stands for key row

    (r % NB) * S + (r // NB) * C + c

Blocks are interleaved, so that whichever thread of a kernel holds a word holds the others of its block as well. Where
the bits of code c are in its word is up to the format: a `Place` for each c.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32

Place = tuple[tuple[int, int], ...]
"""The bits of a code in its word: (bits of the code as a mask, places to the left) of each group that lies together."""

BYTES: tuple[Place, ...] = tuple(((255, 8 * c),) for c in range(4))
"""Four bytes in order."""


def pack(codes: Tensor, places: tuple[Place, ...], block: int) -> Tensor:
    """Words int32 [..., N / C, P] of integer codes [..., N, P], C = len(places), N a multiple of `block`."""
    in_word = len(places)
    codes = codes.int().unflatten(-2, (-1, block // in_word, in_word)).transpose(-4, -3).flatten(-4, -3)
    words = torch.zeros_like(codes[..., 0, :])
    for c, place in enumerate(places):
        for mask, shift in place:
            words |= (codes[..., c, :] & mask) << shift
    return words


def unpack(words: Tensor, places: tuple[Place, ...], block: int) -> Tensor:
    """The codes int32 [..., N, P] that were packed."""
    in_word = len(places)
    codes = torch.stack([sum((words >> shift & mask for mask, shift in place), 0 * words) for place in places], -2)
    return codes.unflatten(-3, (block // in_word, -1)).transpose(-4, -3).flatten(-4, -2)


def word_rows(keys: int, bits: int, block: int, name: str) -> int:
    """Word rows of a column of `keys` key rows.

    Raises:
        ValueError: the last block would not be full.
    """
    if keys % block:
        raise ValueError(f"{name} keeps key rows in blocks of {block}, and key_dim {keys} is not a multiple of it")
    return keys * bits // WORD_BITS
