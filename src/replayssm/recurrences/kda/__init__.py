"""Kimi Delta Attention: decay per key channel, delta rule."""

from replayssm.recurrences.kda.spec import KimiDeltaAttention

RECURRENCE = KimiDeltaAttention()
