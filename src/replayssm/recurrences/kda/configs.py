"""Whole models by the ids of `geometries.py`, as transformers writes a configuration; the rest is its default."""

from __future__ import annotations

from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"

CONFIGS: dict[str, dict[str, Any]] = {
    # every fourth layer attends, and the last one
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear",
        "layer_types": [*[LINEAR, LINEAR, LINEAR, FULL] * 6, LINEAR, LINEAR, FULL],
    },
    "glm-5.3-flash": {"model_type": "glm5_next"},
}
