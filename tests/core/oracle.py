"""An fp64 token-by-token oracle, written from the published formulas. It imports nothing of replayssm, and no torch.

A `Sequence` is a list of tokens and the exact state after each of them. Beside every state stands a bound on the error
that an implementation may have there, per head, so that a tolerance is computed and never guessed:

* `gross` bounds the rounding of the arithmetic. It sums the norms of everything that was ever added to the state, with
  the same decay but without cancellation: gross' = max(d) gross + |what this token adds|. A floating-point sum has an
  error of a small multiple of eps times that.
* `path` sums |log decay|. A window's decays are exp of differences of running sums kept in fp64, each of which is
  rounded: a relative error of fp64's eps times the length of the path, which only shows where decay is strong.
* `drift` bounds what storing the checkpoint in a low-precision format has added. All three rules are contractions,
  |diag(d)| <= 1 and |I - beta k k^T| <= 1 for 0 <= beta <= 2 and |k| <= 1, so an error that enters at a flush is never
  larger later: it decays with d, and each flush adds one rounding of the state.
* `read` bounds the rounding of the read copy, and what its range cuts off; `ring` that of the write vectors, which
  beside a read copy the ring keeps in the model's precision. Both reach outputs and nothing else.

A checkpoint cannot hold values beyond the range [-L, L] of its format. They become +-L, are counted, and the sequence
goes on from there: so does the oracle, whose state is clamped at every fold. No bound grows by this, because clamping
never moves two states apart: |clamp(a) - clamp(b)| <= |a - b|. Only the number of clamped elements is uncertain, by
those that lie within the error bound of L: `clamped` is a pair, the least and the most.

Formulas, per head (N key dim, P value dim, S [N, P]):

    mamba2   S <- exp(dt A) S + B (dt x)^T                         y = S^T C + D x
    gdn      S <- exp(g) S;        u = beta (v - S^T k); S <- S + k u^T; y = S^T q     k, q l2-normalised, q / sqrt(N)
    kda      S <- diag(exp(g)) S;  the same
    conv     out_t = silu(bias + sum_j weight_j x_{t - lag + j})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

Array = np.ndarray
Token = Mapping[str, Array]

# How far one rounding to nearest can take a state from where it was, relative to its norm.
#   casts   half the spacing at 1
#   fp8     half the spacing of 3 mantissa bits, and elements below 2^-6 448ths of their column's largest
#   int8    half a step of amax / 127 for each of the 32 elements of a block: sqrt(32) / 2 / 127
#   nvfp4   magnitudes from 1 up are off by a fifth at most (at 1.25, 2.5, 5), those below by a quarter of the block's
#           scale, which is at most (1 + 2^-4) amax / 6: 0.2 + 0.25 sqrt(16) 1.0625 / 6
# The last term covers that a scale, too, is rounded, and that those of NVFP4's blocks stop at 2^-9.
STEP = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8": 2.0**-4 + 1e-4,
    "int8": 128**0.5 / 2 / 127 + 1e-4,  # columns of at most 128 key rows
    "nvfp4": 0.2 + 1.0625 / 6 + 1e-4,
}
# Below their smallest normal numbers formats have an absolute error: half the distance of neighbours, of an element.
FLOOR = {
    "fp64": 0.0,
    "fp32": 2.0**-150,
    "fp16": 2.0**-25,
    "bf16": 2.0**-134,
    "fp8": 2.0**-109,
    "int8": 2.0**-101,
    "nvfp4": 2.0**-109,
}
LIMIT = {
    "fp64": (2 - 2.0**-52) * 2.0**1023,
    "fp32": (2 - 2.0**-23) * 2.0**127,
    "fp16": (2 - 2.0**-10) * 2.0**15,
    "bf16": (2 - 2.0**-7) * 2.0**127,
    "fp8": 2.0**127,
    "int8": 2.0**127,
    "nvfp4": 2.0**127,
}


@dataclass(frozen=True)
class Next:
    """One token's effect: the state after it, its output, and the sizes that the error bounds need, all per head."""

    state: Array  # [H, N, P]
    y: Array  # [H, P]
    kept: Array  # [H], largest decay factor of the head
    path: Array  # [H], largest |log decay| of the head
    added: Array  # [H], norm of what the token adds to the state, without cancellation
    probe: Array  # [H], norm of the query
    bypass: Array  # [H], norm of the term beside the state


def _norm(x: Array, axes: int | tuple[int, ...]) -> Array:
    return np.sqrt(np.square(x).sum(axes))


def _per_head(x: Array, heads: int) -> Array:
    """Heads h * G / H of a [G, ...] array: value head h uses key head h // (H / G)."""
    return x[np.arange(heads) * x.shape[0] // heads]


def mamba2(state: Array, token: Token, params: Token) -> Next:
    x, dt = token["x"], token["dt"]
    heads = len(dt)
    B, C = _per_head(token["B"], heads), _per_head(token["C"], heads)
    log_decay = dt * params["A"]
    kept = np.exp(log_decay)
    write = dt[:, None] * x
    state = kept[:, None, None] * state + B[:, :, None] * write[:, None, :]
    skip = params["D"][:, None] * x
    y = (state * C[:, :, None]).sum(1) + skip
    return Next(state, y, kept, -log_decay, _norm(B, 1) * _norm(write, 1), _norm(C, 1), _norm(skip, 1))


def _delta(state: Array, token: Token, log_decay: Array) -> Next:
    """`log_decay` [H, 1] or [H, N]."""
    decay = np.exp(log_decay)
    v, beta = token["v"], token["beta"]
    heads, key_dim = len(beta), state.shape[1]
    k, q = token["k"], token["q"]
    k = _per_head(k / np.sqrt(np.square(k).sum(-1, keepdims=True) + 1e-6), heads)
    q = _per_head(q / np.sqrt(np.square(q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(key_dim), heads)
    state = decay[:, :, None] * state
    u = beta[:, None] * (v - (state * k[:, :, None]).sum(1))
    size_k = _norm(k, 1)
    added = beta * size_k * (_norm(v, 1) + _norm(state, (1, 2)) * size_k)
    state = state + k[:, :, None] * u[:, None, :]
    y = (state * q[:, :, None]).sum(1)
    return Next(state, y, decay.max(1), -log_decay.min(1), added, _norm(q, 1), np.zeros(heads))


def gdn(state: Array, token: Token, params: Token) -> Next:
    return _delta(state, token, token["log_decay"][:, None])


def kda(state: Array, token: Token, params: Token) -> Next:
    return _delta(state, token, token["log_decay"])


RULES: dict[str, Callable[[Array, Token, Token], Next]] = {"mamba2": mamba2, "gdn": gdn, "kda": kda}


def chain(tokens: int) -> list[int]:
    """The parents of tokens that follow each other."""
    return list(range(-1, tokens - 1))


def path(parents: list[int], place: int) -> list[int]:
    """The places that lead to `place` in a tree, itself the last; none for -1, where the tree begins."""
    return [] if place < 0 else [*path(parents, parents[place]), place]


def conv(raw: Array, weight: Array, bias: Array | None) -> tuple[Array, Array]:
    """Output of a causal convolution with SiLU at the last of the inputs `raw` [t, channels], and sum of |terms|."""
    width = weight.shape[1]
    window = np.zeros((width, raw.shape[1]))
    recent = raw[-width:]
    window[width - len(recent) :] = recent
    terms = window * weight.T
    total = terms.sum(0) + (0 if bias is None else bias)
    gross = np.abs(terms).sum(0) + (0 if bias is None else np.abs(bias))
    return total / (1 + np.exp(-total)), gross


@dataclass(frozen=True)
class OracleLayer:
    """One layer: its rule, its constants, and its tokens' inputs by token number."""

    rule: Callable[[Array, Token, Token], Next]
    params: Token
    tokens: Mapping[str, Array]  # name -> [number of tokens, ...]
    state_shape: tuple[int, int, int]
    seen: dict[tuple[int, int], tuple[Array, Next]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def corrects(self) -> bool:
        """Whether what a token writes depends on the state."""
        return self.rule is not mamba2

    def token(self, number: int) -> Token:
        return {name: values[number] for name, values in self.tokens.items()}

    def after(self, state: Array, number: int) -> Next:
        """A token's effect on a state. Remembered: a commit asks again for what its step was compared with."""
        key = id(state), number
        if key not in self.seen:
            self.seen[key] = state, self.rule(state, self.token(number), self.params)
        return self.seen[key][1]


@dataclass
class _Trace:
    """A layer's history within one sequence: entry n is after n tokens."""

    states: list[Array]
    gross: list[Array]
    loss: list[Array]  # running sum of log(kept)
    path: list[Array]  # running sum of path
    ring: list[Array]  # error that rounded write vectors of the ring add to the state as outputs see it

    def copy(self, tokens: int) -> _Trace:
        end = tokens + 1
        return _Trace(self.states[:end], self.gross[:end], self.loss[:end], self.path[:end], self.ring[:end])


@dataclass
class Sequence:
    """The tokens committed to one slot, what is pending, and how far the checkpoint has come.

    `parents` says which of the pending tokens each of them follows, -1 where that is the last committed one.

    `folded` counts the tokens in the checkpoint. It enters no state that the checkpoint's format can hold: it says when
    a low-precision checkpoint is rounded (and clamped), and how many records the ring must hold.

    `stochastic` says that the checkpoint may be rounded to either side.

    `ring_step` is the relative rounding of a corrected write vector in the ring.

    `tolerance`, `ring_rows` and `tiny` describe the arithmetic that is tested: its relative error, the records that it
    sums up, and its smallest normal number.
    """

    layers: tuple[OracleLayer, ...]
    checkpoint: str
    read_copy: str | None
    tolerance: float
    ring_rows: int
    tiny: float
    stochastic: bool = False
    ring_step: float = 0.0
    window: int = 0
    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    folded: int = 0

    def __post_init__(self) -> None:
        heads = [layer.state_shape[0] for layer in self.layers]
        self.trace = [
            _Trace([np.zeros(layer.state_shape)], *([np.zeros(h)] for _ in range(4)))
            for layer, h in zip(self.layers, heads, strict=True)
        ]
        self.drift = [np.zeros(h) for h in heads]
        self.read = [np.zeros(h) for h in heads]
        self.clamped = (0, 0)

    @property
    def length(self) -> int:
        return len(self.tokens) - self.folded

    def copy(self, tokens: int | None = None) -> Sequence:
        """The same sequence without what is pending, cut to its first `tokens`."""
        tokens = len(self.tokens) if tokens is None else tokens
        other = replace(self, tokens=self.tokens[:tokens], pending=[], parents=[])
        other.trace = [trace.copy(tokens) for trace in self.trace]
        other.drift, other.read, other.clamped = list(self.drift), list(self.read), self.clamped
        return other

    # ---- what the exact recurrence says

    def state(self, layer: int, tokens: int | None = None) -> Array:
        """[H, N, P] after the first `tokens` committed tokens."""
        return self.trace[layer].states[len(self.tokens) if tokens is None else tokens]

    def outputs(self, layer: int, numbers: list[int], parents: list[int] | None = None) -> list[Next]:
        """Outputs of tokens that would follow the committed ones, and each other as `parents` says or in a chain."""
        spec, found = self.layers[layer], []
        for number, parent in zip(numbers, chain(len(numbers)) if parents is None else parents, strict=True):
            state = self.state(layer) if parent < 0 else found[parent].state
            found.append(spec.after(state, number))
        return found

    # ---- bounds, each [H]

    def eps(self, path: Array) -> Array:
        """Relative error of the arithmetic: the recurrence's tolerance, and that of fp64 sums along the path.

        A running sum of R log decays is rounded at each addition, an error of up to R eps times the sum of their sizes;
        a decay is exp of the difference of two such sums.
        """
        return self.tolerance + 4 * self.ring_rows * STEP["fp64"] * path

    @property
    def floor(self) -> float:
        """A decay that underflows is off by less than `tiny`, times what it multiplies (here < 1e8)."""
        return 1e8 * self.tiny

    def error(self, layer: int, tokens: int | None = None) -> Array:
        """Error that the state after the first `tokens` >= `folded` committed tokens may have."""
        return self.eps(self.path(layer)) * self.gross(layer, tokens) + self.drift_at(layer, tokens) + self.floor

    def gross(self, layer: int, tokens: int | None = None) -> Array:
        return self.trace[layer].gross[len(self.tokens) if tokens is None else tokens]

    def path(self, layer: int) -> Array:
        return self.trace[layer].path[-1]

    def drift_at(self, layer: int, tokens: int | None = None) -> Array:
        """Error that roundings of the checkpoint may have left in the state after `tokens` >= `folded` tokens."""
        return self.drift[layer] * self._kept(layer, len(self.tokens) if tokens is None else tokens)

    def read_at(self, layer: int) -> Array:
        """Error that the read copy and the ring's roundings add to the state as outputs see it."""
        return self.read[layer] * self._kept(layer, len(self.tokens)) + self.trace[layer].ring[-1]

    def _kept(self, layer: int, tokens: int) -> Array:
        loss = self.trace[layer].loss
        return np.exp(loss[tokens] - loss[self.folded])

    # ---- events

    def extend(self, numbers: list[int]) -> None:
        """Commit tokens: all exact states advance."""
        for layer, trace in enumerate(self.trace):
            rounded = self.ring_step if self.layers[layer].corrects else 0.0
            # a write vector is k u^T, |u| at most what the token adds, to which the error of what it read comes
            seen = self.read_at(layer)
            for step in self.outputs(layer, numbers):
                seen = step.kept * seen + rounded * (step.added + seen)
                trace.ring.append(step.kept * trace.ring[-1] + rounded * (step.added + seen))
                trace.states.append(step.state)
                trace.gross.append(step.kept * trace.gross[-1] + step.added)
                trace.path.append(trace.path[-1] + step.path)
                with np.errstate(divide="ignore"):  # a decay may underflow to zero
                    trace.loss.append(trace.loss[-1] + np.maximum(np.log(step.kept), -700))
        self.tokens += numbers

    def fold(self) -> None:
        """The records of the ring, if there are any, go into the checkpoint."""
        if self.length:
            self.store()

    def store(self) -> None:
        """The checkpoint now holds every committed token, clamped to its format's range and after one rounding."""
        tokens = len(self.tokens)
        for number, layer in enumerate(self.layers):
            state, error, drift = self.state(number), self.error(number), self.drift_at(number, tokens)
            self._count(self.checkpoint, state, error)
            limit = LIMIT[self.checkpoint]
            held = self.trace[number].states[-1] = np.clip(state, -limit, limit)
            corrected = bool(self.pending) and layer.corrects
            if corrected and (np.abs(state) + error[:, None, None] > limit).any():
                # Rows that are pending may still be committed. The oracle corrects them against the clamped state, the
                # ring holds them corrected against the state before. With e the error before the clamp, c what clamping
                # takes from the exact state and c' what it takes from the tested one, |c'| <= |c| + |e|, the two states
                # come to differ by C (e + c) - D c': D decays only, C corrects as well, and both are contractions.
                drift = 2 * (error + _norm(state - held, (1, 2)))
            size = _norm(held, (1, 2)) + drift
            if self.rounds_checkpoint():
                drift = drift + (2 if self.stochastic else 1) * self._rounding(self.checkpoint, size)
            # Such rows were also corrected against the old read copy, off by r. Outputs see (C - D) r, |C - D| <= 2,
            # and C e - D c' with c' cut off by the new copy: e is in the other bounds, |c'| <= |c| + |e|, c follows.
            read = 2 * self.read_at(number) + error if corrected else np.zeros_like(drift)
            if self.read_copy is not None:
                self._count(self.read_copy, state, error)
                # outputs see a copy that is clamped to a narrower range; the state that they are compared with is not
                limit = LIMIT[self.read_copy]
                read = read + _norm(np.maximum(np.abs(held) - limit, 0), (1, 2)) + self._rounding(self.read_copy, size)
            self.drift[number], self.read[number] = drift, read
            self.trace[number].ring[-1] = np.zeros_like(drift)
        self.folded = tokens

    def load(self, numbers: list[int]) -> None:
        """The exact state after these tokens too, computed elsewhere, takes the place of what the slot held."""
        self.extend(numbers)
        self.pending, self.drift = [], [np.zeros_like(drift) for drift in self.drift]
        self.fold()

    def rounds_checkpoint(self) -> bool:
        """Whether storing the checkpoint now rounds it. Stored again as it was it is exact, but for a scale's last bit.

        A value that a last bit has moved off the grid may be rounded at random to the next one.
        """
        narrow, casts = self.checkpoint not in ("fp64", "fp32"), self.checkpoint in ("fp16", "bf16")
        return narrow and (self.length > 0 or (self.stochastic and not casts))

    def _count(self, form: str, state: Array, error: Array) -> None:
        """Add the elements of a state about to be stored that lie beyond the format's range: the least, the most."""
        beyond, error = np.abs(state) - LIMIT[form], error[:, None, None]
        least, most = self.clamped
        self.clamped = least + int((beyond > error).sum()), most + int((beyond > -error).sum())

    def _rounding(self, form: str, size: Array) -> Array:
        """Norm of one rounding to nearest of a state of norm `size`, per head.

        The last factor covers that the value rounded is itself off by the arithmetic's relative error.
        """
        elements = np.prod(self.layers[0].state_shape[1:])
        return (STEP[form] * size + FLOOR[form] * np.sqrt(elements)) * (1 + 1e-4)
