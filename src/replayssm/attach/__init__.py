"""Replay in an existing model library: `attach` changes one model instance, `detach` gives it back as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.config import ReplayConfig
from replayssm.recurrences.binding import supported_families

if TYPE_CHECKING:
    from torch import nn

    from replayssm.attach.transformers.attached import Attached

# transformers takes seconds to import, so it is imported by the first call and not by `import replayssm`.


def attach(model: nn.Module, config: ReplayConfig | None = None, *, fused: bool | None = None) -> Attached:
    """Let a transformers model keep its recurrent state as checkpoint and ring.

    `model.generate()` and calls with a cache work as before. The class, other instances and the weights are untouched.

    `generate(prompt_lookup_num_tokens=...)` and `generate(assistant_model=...)`, which transformers refuses for these
    models otherwise, work as well. One forward verifies `verify_len` tokens, the certain one and the drafts behind it;
    left at 1, it stands for min(window, 16) there. Longer drafts are cut, with a warning. An assistant that has a
    recurrent state must be attached, too. Models without attention cannot be assisted.

    Args:
        model: a model of one of `supported_families()`.
        config: how the state is kept; `ReplayConfig()` by default.
        fused: whether decode steps run everything between a layer's projections in kernels of their own, which is
            faster and rounds less often than the model's own forward. By default where the Triton kernels run and the
            layer is one that they know; True asks for it on any device, False for the model's own forward.
            `describe()` of the result says which layers do what.

    Raises:
        TypeError: `model` is no model, `config` no ReplayConfig, or `fused` no bool.
        ValueError: the model is already attached, or cannot be; the message says why.
    """
    from replayssm.attach.transformers import attached

    return attached.attach(model, ReplayConfig() if config is None else config, fused)


def detach(model: nn.Module) -> None:
    """Give an attached model back as it was. Caches that it filled cannot be used any more.

    Raises:
        ValueError: the model is not attached.
    """
    from replayssm.attach.transformers import attached

    attached.detach(model)


__all__ = ["attach", "detach", "supported_families"]
