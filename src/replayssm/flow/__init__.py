"""When it happens: the verbs of a sequence's life, on a vectorised torch back end (CPU and CUDA).

A model step is `open_step` before the first layer, one `verify` per layer, `close_step` after the last; or the context
manager `step`, which also marks the slots broken when something fails in between. `commit` follows with what was
accepted, or `commit_path` where the drafts were a tree. Prompts use `prompt` in place of `step`, with `prefill` or
`load` per layer. `causal_conv` is a layer's convolution, and `mix` everything between its projections.
"""

from replayssm.flow.commit import commit, commit_path
from replayssm.flow.conv import causal_conv, conv_append, conv_window
from replayssm.flow.flush import flush
from replayssm.flow.materialize import materialize, materialize_into
from replayssm.flow.mixer import mix
from replayssm.flow.prefill import load, prefill
from replayssm.flow.step import Step, close_step, open_step, prompt, step
from replayssm.flow.verify import verify

__all__ = [
    "Step",
    "causal_conv",
    "close_step",
    "commit",
    "commit_path",
    "conv_append",
    "conv_window",
    "flush",
    "load",
    "materialize",
    "materialize_into",
    "mix",
    "open_step",
    "prefill",
    "prompt",
    "step",
    "verify",
]
