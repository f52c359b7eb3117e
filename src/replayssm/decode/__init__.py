"""A decode loop of our own over an attached model, with speculation in chains and in trees.

    drafts      what is guessed: a tree of tokens behind the last certain one
    proposers   who guesses: text that came before (`PromptLookup`), a smaller model (`DraftModel`)
    acceptance  what stays of a draft: the likeliest tokens, or the exact rejection rule of sampling
    session     a batch of sequences in a model, whose steps take drafts and keep a path of them
    loop        the loop itself, `decode`

transformers is imported with this package and not with `replayssm`.
"""

from replayssm.decode.acceptance import Sampling
from replayssm.decode.drafts import Draft
from replayssm.decode.loop import Round, decode
from replayssm.decode.proposers import DraftModel, PromptLookup, Proposer
from replayssm.decode.session import Session

__all__ = ["Draft", "DraftModel", "PromptLookup", "Proposer", "Round", "Sampling", "Session", "decode"]
