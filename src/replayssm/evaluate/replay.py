"""One recurrent layer over a whole text, window by window, for several precisions at once.

The text is given, so a layer's inputs at all its tokens are known before the layer runs: the layers take turns over the
text, where decoding takes the tokens in turns over the layers. Each layer decodes as ever, in steps of `verify` and a
commit of all tokens. The first token of a window is a step of its own, because there decoding differs: it folds, and
then reads the checkpoint that it has in hand. The others read the read copy, as many as fit into a step.

All rows of all settings are at the same token, so that one cursor serves them all: a step is opened and closed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replayssm import flow
from replayssm.config import ReplayConfig
from replayssm.recurrences.base import Geometry, Recurrence
from replayssm.state.pool import StatePool

PIECE = 128
"""Tokens between two looks at the states, up to whole windows. On a GPU they are one CUDA graph, which is replayed."""


def piece_of(config: ReplayConfig) -> int:
    """`PIECE`, up to a whole number of windows."""
    return -(-PIECE // config.window) * config.window


@dataclass(frozen=True)
class LayerRun:
    """What one layer did.

    Args:
        outputs: y [settings * rows, T, H, P].
        state_error: relative Frobenius error of the states after each piece against those of the first setting,
            [settings, pieces], mean over rows.
        half_life: tokens after which a head has forgotten half by its decay alone, [H], from its mean log decay over
            the text; the mean over key channels where they decay by themselves.
        memory: tokens after which 1 / e of the state is left, [H]. Besides its decay a delta rule overwrites: a token
            takes the share `rate` of one direction of N, and so rate / N of all of them on average.
    """

    outputs: Tensor
    state_error: Tensor
    half_life: Tensor
    memory: Tensor


class LayerReplay:
    """The pools of one layer, one for each setting.

    Args:
        recurrence, geometry, params: the layer.
        configs: how each setting keeps the state; all with the same window and verify_len, none staggered.
        rows: sequences per setting.
        model_dtype: of the activations.
        device: of the inputs.
        layer: number of the layer, part of the seed of stochastic rounding.
    """

    def __init__(
        self,
        recurrence: Recurrence,
        geometry: Geometry,
        params: Mapping[str, Tensor],
        configs: Sequence[ReplayConfig],
        rows: int,
        model_dtype: torch.dtype,
        device: torch.device,
        layer: int,
    ) -> None:
        self.recurrence, self.geometry, self.rows = recurrence, geometry, rows
        self.pools = [
            StatePool.allocate(
                recurrence,
                geometry,
                config,
                slots=rows,
                model_dtype=model_dtype,
                device=device,
                params=[params],
                backend="torch",
            )
            for config in configs
        ]
        for pool in self.pools:
            for row in range(rows):
                pool.acquire(row, seed=layer << 32 | row)
        for pool in self.pools[1:]:  # settings may run side by side, and each counts for itself what it clamps
            pool.cursor = replace(self.pools[0].cursor, saturated=pool.cursor.saturated)
        self.slots = torch.arange(rows, device=device)
        self.layout = self.pools[0].layers[0].layout
        self.begun = False  # whether the rings have tokens
        self.streams = [torch.cuda.Stream() for _ in self.pools] if device.type == "cuda" else []

    def run(self, inputs: Mapping[str, Tensor], progress: Callable[[int], None] | None = None) -> LayerRun:
        """Decode the text.

        Args:
            inputs: fields of `recurrence.inputs`, each [settings * rows, T, ...], setting by setting.
            progress: called with the number of tokens done since the last call.
        """
        taken = {f.name: inputs[f.name].to(self.layout.dtype_of(f)) for f in self.recurrence.inputs}
        batch, length = next(iter(taken.values())).shape[:2]
        y = torch.empty(
            batch, length, self.geometry.heads, self.geometry.value_dim, device=self.slots.device, dtype=torch.float32
        )
        piece = piece_of(self.layout.config)
        decode: Callable[[Mapping[str, Tensor]], Tensor] = self._decode
        errors = []
        for begin in range(0, length, piece):
            part = {name: x[:, begin : begin + piece] for name, x in taken.items()}
            if begin == piece and self.streams and length >= 4 * piece:
                decode = self._graphed(part)  # the first piece differs, and libraries have set themselves up in it
            whole = min(piece, length - begin) == piece
            y[:, begin : begin + piece] = (decode if whole else self._decode)(part)
            errors.append(self._state_errors())
            if progress is not None:
                progress(min(piece, length - begin))
        params = self.pools[0].layers[0].params
        record = self.recurrence.record({name: x[: self.rows].to(torch.float32) for name, x in taken.items()}, params)
        forgotten = (-self.recurrence.decay_channels(record, params).double().mean((0, 1))).clamp(min=1e-12)
        half_life = (math.log(2) / forgotten).mean(-1)
        if self.recurrence.delta_rule:
            overwritten = self.recurrence.rate(record).double().mean((0, 1)) / self.geometry.key_dim
            forgotten = forgotten + overwritten.unsqueeze(-1)
        return LayerRun(y, torch.stack(errors, 1), half_life, (1 / forgotten).mean(-1))

    def _decode(self, part: Mapping[str, Tensor]) -> Tensor:
        """Outputs of the next piece of the text; settings run on streams of their own where there are any."""
        config, clock = self.layout.config, self.pools[0]
        length, window = next(iter(part.values())).shape[1], config.window
        main = torch.cuda.current_stream() if self.streams else None
        outputs: list[list[Tensor]] = [[] for _ in self.pools]
        steps = []  # until all streams have met: memory that is free here could be written while another one reads it
        begin = 0
        while begin < length:
            behind = begin % window  # tokens of this window that the ring has
            tokens = min(1 if behind == 0 else config.verify_len, window - behind, length - begin)
            folds = behind == 0 and self.begun
            step = replace(flow.open_step(clock, self.slots, tokens), folds=folds, is_full=True)
            steps.append(step)
            for number, pool in enumerate(self.pools):
                mine = slice(number * self.rows, (number + 1) * self.rows)
                inputs = {name: x[mine, begin : begin + tokens] for name, x in part.items()}
                if main is None:
                    outputs[number].append(flow.verify(pool, 0, step, inputs))
                    continue
                self.streams[number].wait_stream(main)  # for the plan; the cursor runs ahead of the states
                with torch.cuda.stream(self.streams[number]):
                    outputs[number].append(flow.verify(pool, 0, step, inputs))
            flow.close_step(clock, step)
            flow.commit(clock, self.slots, tokens)
            begin += tokens
            self.begun = True
        if main is not None:
            for stream in self.streams:
                main.wait_stream(stream)
        return torch.cat([torch.cat(each, 1) for each in outputs])

    def _graphed(self, part: Mapping[str, Tensor]) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """`_decode` as a CUDA graph: of the hundreds of small launches of a window, none waits for the host."""
        static = {name: x.clone() for name, x in part.items()}
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self._decode(static)

        def decode(part: Mapping[str, Tensor]) -> Tensor:
            for name, x in part.items():
                static[name].copy_(x)
            graph.replay()
            return out

        return decode

    def _state_errors(self) -> Tensor:
        """[settings], of the checkpoints, which have the same tokens."""
        states = [pool.layers[0].state(self.slots, "checkpoint") for pool in self.pools]
        reference = states[0]
        size = reference.flatten(1).norm(dim=1).clamp(min=1e-30)
        return torch.stack([((state - reference).flatten(1).norm(dim=1) / size).mean() for state in states])
