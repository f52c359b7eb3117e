"""Which layers of a model can run `flow.mix` in place of their own forward, and how."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from replayssm.attach.transformers.find import RecurrentLayer
from replayssm.attach.transformers.sequences import Sequences
from replayssm.flow.conv import ACTIVATIONS
from replayssm.recurrences.mixer import Norm


def refusal(layer: RecurrentLayer) -> str | None:
    """Why a layer runs its own forward in every step, or None where its recurrence's mixer says what it does.

    The modules that the fused step does not call are compared with what is written of them on random numbers.
    """
    described, module = layer.binding.mixer, layer.mixer
    if described is None:
        return f"{layer.recurrence.title} has no mixer"
    known: Any = next(cls for cls in type(module).__mro__ if cls.__name__ in layer.binding.mixers)
    if not known.__module__.startswith("transformers.") or type(module).forward is not known.forward:
        return f"{type(module).__name__} has a forward of its own"
    try:
        weights = described.weights(module)
        norm, out = described.norm(module), described.out(module)
    except AttributeError as error:
        return f"{type(module).__name__} is built differently: {error}"
    conv = module.conv1d
    if type(conv) is not nn.Conv1d or not weights.conv.is_floating_point():
        return f"its convolution is {type(conv).__name__} in {weights.conv.dtype}"
    if weights.activation not in ACTIVATIONS:
        return f"its convolution is followed by {weights.activation}"
    if not all(parameter.is_contiguous() for parameter in weights.gates):
        return "a parameter of its gates is not contiguous"
    if not isinstance(out, nn.Module):
        return f"its output projection is {type(out).__name__}"
    hooked = next((other for other in not_called(layer) if _has_hooks(other)), None)
    if hooked is not None:
        return f"its {type(hooked).__name__} has hooks, which would not run"
    try:
        if norm is not None:
            reason = _norm_refusal(norm, weights.norm, layer.geometry.heads * layer.geometry.value_dim)
            if reason is not None:
                return reason
        return described.refusal(module)
    except (TypeError, RuntimeError) as error:
        return f"a module around its recurrence takes or returns other tensors: {error}"


def not_called(layer: RecurrentLayer) -> tuple[nn.Module, ...]:
    """The modules of a layer that its own forward calls and its fused step does not."""
    mixer, module = layer.binding.mixer, layer.mixer
    if mixer is None:
        return ()
    norm = mixer.norm(module)
    return (*mixer.others(module), *([] if norm is None else [norm]))


def unchanged(layer: RecurrentLayer, known: tuple[nn.Module, ...]) -> bool:
    """Whether the modules that are not called are still those that `refusal` looked at, without hooks."""
    now = not_called(layer)
    return now == known and not any(map(_has_hooks, now))


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _norm_refusal(module: Any, norm: Norm, width: int) -> str | None:
    name = type(module).__name__
    if norm.weight is None or norm.weight.numel() not in (width, norm.size) or not norm.weight.is_contiguous():
        return f"its {name} has weights of another shape"
    # a norm of whole tokens takes them as such, one of heads takes heads
    last = norm.weight.numel()
    draw = torch.Generator().manual_seed(0)
    y, z = (torch.randn(2, 3, width, generator=draw).to(norm.weight.device) for _ in range(2))
    with torch.no_grad():
        theirs = module(y.view(2, -1, last), z.view(2, -1, last)).reshape(2, 3, width)
        ours = norm(y.unsqueeze(2), z)
        # its weights may have 16 bits, and what it makes of them be rounded to those
        tolerance = 4 * torch.finfo(torch.promote_types(theirs.dtype, norm.weight.dtype)).eps
        tolerance = max(tolerance, 4 * torch.finfo(norm.weight.dtype).eps, 1e-5)
        same = torch.allclose(theirs.float(), ours, rtol=tolerance, atol=tolerance)
    return None if same else f"{name} is not the norm that is known"


def fused_forward(
    layer: RecurrentLayer, sequences: Sequences, ordinal: int, hidden: Tensor, mask: Tensor | None
) -> Tensor:
    """A mixer's forward over the tokens `hidden` [B, T, *] of the open step, which goes to the ring.

    `mask` [B, T] is False at padding tokens; `Mixer.masks_inputs` says whether there may be one.
    """
    described, module = layer.binding.mixer, layer.mixer
    assert described is not None
    if mask is not None:
        hidden = (hidden * mask.unsqueeze(2)).to(hidden.dtype)
    projected = described.project(module, hidden)
    mixed = sequences.mix(ordinal, described, described.weights(module), projected)
    return described.out(module)(mixed)
