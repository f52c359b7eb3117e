"""The arithmetic of a window, without slots, rings or cursors.

B rows, R records, T tokens, H state heads, G key heads, C decay channels (1 or N). Everything is in the compute dtype
and already masked: an absent record has k = 0, u = 0 and log_decay = 0 and so contributes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.recurrences.base import Geometry

SMALLEST_LOG = -1e4
"""exp of less is zero in fp64 with room to spare."""


def chain(tokens: int, device: torch.device) -> Tensor:
    """bool [1, T, T]: what each of T tokens in a row descends from, itself included."""
    return torch.ones(1, tokens, tokens, dtype=torch.bool, device=device).tril()


def lineage(parents: Tensor) -> Tensor:
    """bool [B, T, T]: what each token of a tree descends from, itself included.

    Args:
        parents: int64 [B, T], an earlier token of the row, or -1 where there is none.
    """
    rows, tokens = parents.shape
    batch = torch.arange(rows, device=parents.device)
    sees = torch.eye(tokens, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    for t in range(1, tokens):
        parent = parents[:, t]
        sees[:, t] |= sees[batch, parent.clamp(min=0)] & (parent >= 0).unsqueeze(1)
    return sees


def path_sums(log_decay: Tensor, paths: Tensor | None = None) -> Tensor:
    """Sums G of log_decay [B, R, H, C] along paths, in fp64: running sums, or [B, T, H, C] of those in `paths`.

    A strong decay early in the window makes G large; in fp32 a later difference G_t - G_j would carry its absolute
    rounding error (6e-6 at G = -100), which exp turns into a relative one. A decay of zero, whose logarithm is -inf,
    counts as one that exp still takes to zero: the difference of two infinities would be NaN.

    Args:
        log_decay: [B, R, H, C].
        paths: bool [B, T, R], the records on the path to each token.
    """
    raised = log_decay.double().clamp(min=SMALLEST_LOG)
    return raised.cumsum(1) if paths is None else torch.einsum("btr,brhc->bthc", paths.double(), raised)


def decay_between(later: Tensor, earlier: Tensor, reaches: Tensor) -> Tensor:
    """exp(G_t - G_j) [B, T, R, H, C] in fp64 where token t sees record j, else 0.

    The exponent is masked, not the product: beyond the path it is positive and may overflow.

    Args:
        later: path sums of the tokens [B, T, H, C], fp64.
        earlier: path sums of the records [B, R, H, C], fp64.
        reaches: bool [B, T, R].
    """
    exponent = later.unsqueeze(2) - earlier.unsqueeze(1)
    return torch.where(reaches[..., None, None], exponent, -torch.inf).exp()


def products(probe: Tensor, key: Tensor, decay: Tensor, geometry: Geometry) -> Tensor:
    """sum_c key_jc decay_tjc probe_tc: [B, T, R, H].

    Args:
        probe: [B, T, G, N].
        key: [B, R, G, N].
        decay: [B, T, R, H, C].
    """
    if decay.shape[-1] == 1:
        dots = torch.einsum("btgn,brgn->btrg", probe, key)  # shared by the heads of a group
        return geometry.expand_heads(dots, 3) * decay.squeeze(-1)
    probe, key = geometry.expand_heads(probe, 2), geometry.expand_heads(key, 2)
    return torch.einsum("bthn,brhn,btrhn->btrh", probe, key, decay)


def read_state(state: Tensor, probe: Tensor, decay: Tensor, geometry: Geometry) -> Tensor:
    """(diag(decay_t) S)^T probe_t: [B, T, H, P].

    Args:
        state: [B, H, N, P].
        probe: [B, T, G, N].
        decay: [B, T, H, C], exp of the whole path since the checkpoint.
    """
    scaled = geometry.expand_heads(probe, 2) * decay
    return torch.einsum("bhnp,bthn->bthp", state, scaled)


def solve(rate: Tensor, error: Tensor, overlap: Tensor) -> Tensor:
    """Write vectors of T delta-rule tokens: (I + diag(rate) A) U = diag(rate) error, by forward substitution.

    Inverting by doubling is shorter to write and loses all digits on correlated keys (docs/numerics.md).

    Args:
        rate: [B, T, H].
        error: target minus what checkpoint and history answer, [B, T, H, P].
        overlap: A [B, T, T, H], zero where the second token is no ancestor of the first; only the strictly lower part
            is read.
    """
    u = torch.zeros_like(error)
    for t in range(error.shape[1]):
        earlier = torch.einsum("bjh,bjhp->bhp", overlap[:, t, :t], u[:, :t])
        u[:, t] = rate[:, t].unsqueeze(-1) * (error[:, t] - earlier)
    return u


def fold(state: Tensor, key: Tensor, u: Tensor, log_decay: Tensor, geometry: Geometry) -> Tensor:
    """The state after R records: exp(G_R) S + sum_j exp(G_R - G_j) k_j u_j^T, [B, H, N, P].

    Computed in fp64 and rounded once: this is the only place where rounding accumulates. A slow decay, nearly the same
    factor at every flush, would otherwise carry its rounding error like a drift of the decay itself (1e-5 after 8,192
    tokens, docs/numerics.md).

    Args:
        state: [B, H, N, P].
        key: [B, R, G, N].
        u: [B, R, H, P].
        log_decay: [B, R, H, C].
    """
    sums = path_sums(log_decay)
    total = sums[:, -1:]
    weighted = geometry.expand_heads(key, 2) * (total - sums).exp()
    added = torch.einsum("brhn,brhp->bhnp", weighted, u.double())
    return (total.squeeze(1).exp().unsqueeze(-1) * state + added).to(state.dtype)
