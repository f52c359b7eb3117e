"""Mamba-2: scalar decay per head, the write vector is an input."""

from replayssm.recurrences.mamba2.spec import Mamba2

RECURRENCE = Mamba2()
