"""Two recurrences that the library does not have, each as the text of a folder: all that adding one takes."""

GATED_LINEAR_ATTENTION = {
    "__init__.py": """
import torch

from replayssm.recurrences.base import Field, Recurrence


class Toy(Recurrence):
    name = "gla"
    title = "Gated linear attention"
    decay = "channel"
    delta_rule = False
    inputs = (
        Field("q", ("key_heads", "key_dim"), "model", "query"),
        Field("k", ("key_heads", "key_dim"), "model", "key"),
        Field("v", ("heads", "value_dim"), "model", "value"),
        Field("gate", ("heads", "key_dim"), "exact", "log decay"),
    )
    params = (Field("scale", ("heads",), "exact", "weight of the value that bypasses the state"),)
    records = inputs[1:]

    def record(self, inputs, params):
        return {name: inputs[name] for name in ("k", "v", "gate")}

    def log_decay(self, record, params):
        return record["gate"]

    def key(self, record):
        return record["k"]

    def query(self, inputs, params):
        return inputs["q"]

    def write(self, record):
        return record["v"]

    def skip(self, inputs, params):
        return params["scale"][:, None] * inputs["v"]

    def draw(self, geometry, shape, generator):
        def normal(*dims):
            return torch.randn(*shape, *dims, generator=generator)

        H, N, P = geometry.heads, geometry.key_dim, geometry.value_dim
        gate = torch.nn.functional.logsigmoid(normal(H, N) + 2)
        params = {"scale": torch.randn(H, generator=generator)}
        return {"q": normal(H, N), "k": normal(H, N), "v": normal(H, P), "gate": gate}, params

    def recurrent(self, inputs, params, state, geometry):
        rows = (inputs[name].to(state.dtype) for name in ("q", "k", "v", "gate"))
        scale, outputs = params["scale"].to(state.dtype), []
        for q, k, v, gate in zip(*rows):
            state = gate.exp()[..., None] * state + k[..., None] * v[:, None]
            outputs.append((state * q[..., None]).sum(1) + scale[:, None] * v)
        return torch.stack(outputs), state


RECURRENCE = Toy()
"""
}

PLAIN_DELTA_RULE = {
    "__init__.py": """
import torch

from replayssm.recurrences.delta import DeltaRule


class Toy(DeltaRule):
    name = "plain_delta"
    title = "Delta rule with a constant decay"
    decay = "head"

    def recurrent(self, inputs, params, state, geometry):
        inputs = {name: x.to(state.dtype) for name, x in inputs.items()}
        group = geometry.heads // geometry.key_heads
        outputs = []
        for t in range(len(inputs["v"])):
            k, q = inputs["k"][t], inputs["q"][t]
            k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 0)
            q = (q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 0)
            state = inputs["log_decay"][t].exp()[:, None, None] * state
            error = inputs["v"][t] - (state * k[..., None]).sum(1)
            state = state + k[..., None] * (inputs["beta"][t][:, None] * error)[:, None]
            outputs.append((state * q[..., None]).sum(1) / geometry.key_dim**0.5)
        return torch.stack(outputs), state

    def draw(self, geometry, shape, generator):
        def normal(*dims):
            return torch.randn(*shape, *dims, generator=generator)

        H, G, N, P = geometry.heads, geometry.key_heads, geometry.key_dim, geometry.value_dim
        inputs = {"q": normal(G, N), "k": normal(G, N), "v": normal(H, P)}
        return inputs | {"log_decay": torch.full((*shape, H), -0.05), "beta": normal(H).sigmoid()}, {}


RECURRENCE = Toy()
"""
}

TOYS = {"gla": GATED_LINEAR_ATTENTION, "plain_delta": PLAIN_DELTA_RULE}
