"""ReplaySSM in vLLM: `register` is its entry point in the group `vllm.general_plugins`.

    vllm serve MODEL --additional-config '{"replayssm": {"window": 16}}'

vLLM calls `register` in every process, before it reads a configuration. What is registered asks the configuration
itself, and is vLLM's own where replay was not asked for.
"""

from __future__ import annotations


def register() -> None:
    """Let vLLM's recurrent layers, and the model classes that size their states, know about replay. Idempotent."""
    from replayssm.attach.vllm import plugin

    plugin.register()


__all__ = ["register"]
