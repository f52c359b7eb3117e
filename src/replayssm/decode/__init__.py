"""A decode loop of our own over an attached model, with speculation in chains and in trees.

    drafts      what is guessed: a tree of tokens behind the last certain one
    proposers   who guesses: text that came before (`PromptLookup`), a smaller model (`DraftModel`)
    acceptance  what stays of a draft: the likeliest tokens, or the exact rejection rule of sampling
    columns     keys and values of rows that differ in length, in memory that stays
    attention   of few tokens on a long cache, for query heads that share keys
    compiled    norms and feed-forward layers, whose small steps torch.compile makes one
    session     a batch of sequences in a model, whose steps take drafts and keep a path of them
    runner      the same for throughput: all of it on the device, a step is one CUDA graph
    loop        the loop itself, `decode`

transformers is imported with this package and not with `replayssm`.
"""

from replayssm.decode.acceptance import Sampling
from replayssm.decode.attention import GROUPED, STATIC
from replayssm.decode.compiled import compile_neighbours
from replayssm.decode.drafts import Draft
from replayssm.decode.loop import Round, decode
from replayssm.decode.proposers import DraftModel, PromptLookup, Proposer
from replayssm.decode.runner import Runner
from replayssm.decode.session import Session

__all__ = [
    "GROUPED",
    "STATIC",
    "Draft",
    "DraftModel",
    "PromptLookup",
    "Proposer",
    "Round",
    "Runner",
    "Sampling",
    "Session",
    "compile_neighbours",
    "decode",
]
