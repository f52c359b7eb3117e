"""Gated DeltaNet: scalar decay per head, delta rule."""

from replayssm.recurrences.gdn.spec import GatedDeltaNet

RECURRENCE = GatedDeltaNet()
