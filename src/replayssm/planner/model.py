"""What a decode step of a model reads and computes besides its recurrent state, from its configuration alone.

The model is built without memory (on torch's meta device), so that every weight is counted where it really is, and the
recurrent layers are found as `attach` finds them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from replayssm.recurrences import Geometry, Recurrence, registry
from replayssm.recurrences.binding import bindings, supported_families

MODEL_DTYPE = torch.bfloat16
"""Weights and activations of everything that is predicted or benchmarked."""

PER_LAYER = ("layers_block_type", "layer_types", "mlp_layer_types")
"""Fields of configurations that have an entry per layer."""

EXPERTS_CHOSEN = ("num_experts_per_tok", "num_experts_per_token")
"""What configurations call the number of experts that a token takes."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer.

    Args:
        count: how many there are.
        chosen: how many each token takes.
        weights: of one expert.
    """

    count: int
    chosen: int
    weights: int

    def touched(self, tokens: int) -> float:
        """How many experts these tokens need when each one's choice is as good as random."""
        return self.count * (1 - (1 - self.chosen / self.count) ** tokens)


@dataclass(frozen=True)
class ModelSizes:
    """One model.

    Args:
        name: for people.
        recurrent: (recurrence, geometry, number of layers) of its recurrent layers.
        parameters: all weights of the language model.
        matrices: weights of each matrix that every token is multiplied with, the one in front of the vocabulary last.
        experts: of each layer that has routed ones.
        attention_layers: layers with keys and values.
        kv_elements: elements that one of them keeps per token.
        score_flops: multiplications and additions of one of them per query token and token of the context.
        layers: all layers, as the model counts them.
    """

    name: str
    recurrent: tuple[tuple[Recurrence, Geometry, int], ...]
    parameters: int
    matrices: tuple[int, ...]
    experts: tuple[Experts, ...]
    attention_layers: int
    kv_elements: int
    score_flops: int
    layers: int

    @property
    def recurrent_layers(self) -> int:
        return sum(count for _, _, count in self.recurrent)


def known_configs() -> dict[str, dict[str, Any]]:
    """Configurations of published models by id, from each recurrence's folder (`configs.py`)."""
    found: dict[str, dict[str, Any]] = {}
    for name in registry():
        module = f"replayssm.recurrences.{name}.configs"
        if find_spec(module) is not None:
            found |= import_module(module).CONFIGS
    return found


def read_fields(model: str) -> dict[str, Any]:
    """The configuration of an id of `known_configs`, a config.json or a folder that holds one.

    Raises:
        ValueError: there is no such thing.
    """
    known = known_configs()
    if model in known:
        return known[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"there is no file {model}, and no model is called that; the known ones are: {', '.join(known)}"
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is no configuration of transformers: it holds no JSON object")
    return fields


def config_of(fields: Mapping[str, Any]) -> Any:
    """The transformers configuration that these fields are.

    Raises:
        ValueError: transformers does not know it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise ValueError("this is no configuration of transformers: it has no model_type")
    try:
        return AutoConfig.for_model(kind, **{name: value for name, value in fields.items() if name != "model_type"})
    except StrictDataclassError as error:
        raise ValueError(f"transformers does not take this configuration: {' '.join(str(error).split())}") from None
    except ValueError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"transformers does not take this configuration: {reason}") from None


def fewer_layers(fields: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """A configuration of the first layers only; all of them by default.

    Raises:
        ValueError: it has fewer layers, or none are left.
    """
    if layers is None:
        return dict(fields)
    text = fields.get("text_config")
    if isinstance(text, Mapping):
        return {**fields, "text_config": fewer_layers(text, layers)}
    if not 1 <= layers <= fields.get("num_hidden_layers", layers):
        raise ValueError(f"layers must be in 1..{fields.get('num_hidden_layers', '')}, got {layers}")
    cut = {name: fields[name][:layers] for name in PER_LAYER if name in fields}
    return {**fields, **cut, "num_hidden_layers": layers}


def build(config: Any, **options: Any) -> Any:
    """The model of a configuration with random weights, the text part alone where there are others.

    Args:
        config: of transformers.
        options: for `from_config`.

    Raises:
        ValueError: transformers has no language model of this configuration.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    text = config.get_text_config(decoder=True)
    for auto, given in (
        (AutoModelForCausalLM, text),
        (AutoModelForCausalLM, config),
        (AutoModelForImageTextToText, config),
    ):
        if type(given) in auto._model_mapping:
            return auto.from_config(given, **options)
    raise ValueError(
        f"{config.model_type} has no language model with recurrent layers in transformers; supported families: "
        f"{', '.join(supported_families())}"
    )


def keeps_keys(config: Any) -> list[bool]:
    """Of each layer of a model's cache whether it has keys and values."""
    from transformers.cache_utils import DynamicCache

    from replayssm.attach.transformers.layers import attention_class

    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return [attention_class(type(layer)) is not None for layer in layers]


def sizes_of(name: str, config: Any) -> ModelSizes:
    """Count a model that is built without memory.

    Raises:
        ValueError: it has no recurrent layer that can be replayed.
    """
    with torch.device("meta"):
        model = build(config, dtype=MODEL_DTYPE)
    text = model.config.get_text_config(decoder=True)
    known = bindings()
    recurrent: Counter[tuple[str, Geometry]] = Counter()
    kinds: dict[str, Recurrence] = {}
    for module in model.modules():
        if type(module).__name__ in known:
            recurrence, binding = known[type(module).__name__]
            kinds[recurrence.name] = recurrence
            recurrent[recurrence.name, binding.geometry(module)] += 1
    if not recurrent:
        raise ValueError(
            f"{name} ({config.model_type}) has no recurrent layer that can be replayed; supported families: "
            f"{', '.join(supported_families())}"
        )
    # pictures are encoded with the prompt and take no part in a decode step
    language = [(path, module) for path, module in model.named_modules() if "visual" not in path]
    head = model.get_output_embeddings()
    weights = {id(p): p.numel() for _, module in language for p in module.parameters(recurse=False)}
    matrices = [m.weight.numel() for _, m in language if isinstance(m, nn.Linear) and m is not head]
    attention = sum(keeps_keys(config))
    kv_elements, score_flops = _attention(text) if attention else (0, 0)
    return ModelSizes(
        name=name,
        recurrent=tuple((kinds[kind], geometry, count) for (kind, geometry), count in recurrent.items()),
        parameters=sum(weights.values()),
        matrices=(*matrices, head.weight.numel()),
        experts=tuple(_experts(text, language)),
        attention_layers=attention,
        kv_elements=kv_elements,
        score_flops=score_flops,
        layers=text.num_hidden_layers,
    )


def _attention(text: Any) -> tuple[int, int]:
    """(elements kept per token, flops per query and context token) of one attention layer."""
    heads = text.num_attention_heads
    latent, selecting = getattr(text, "kv_lora_rank", None), getattr(text, "index_head_dim", None)
    if latent:  # keys and values of all heads are one vector per token, and scores are taken in its space
        indexer = 2 * selecting + 1 if selecting else 0  # what selects among them: two vectors and a weight
        return latent + text.qk_rope_head_dim + indexer, 2 * heads * (2 * latent + text.qk_rope_head_dim)
    dim = getattr(text, "attention_head_dim", None) or getattr(text, "head_dim", None) or text.hidden_size // heads
    return 2 * text.num_key_value_heads * dim, 4 * heads * dim


def _experts(text: Any, language: list[tuple[str, nn.Module]]) -> list[Experts]:
    chosen = next((getattr(text, name) for name in EXPERTS_CHOSEN if getattr(text, name, None)), None)
    found = []
    for _, module in language:
        # all experts of a layer lie in tensors [experts, rows, columns] of one module
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]
        if chosen is None or not stacked or isinstance(module, nn.Conv1d):
            continue
        count = stacked[0].shape[0]
        if all(p.shape[0] == count for p in stacked):
            found.append(Experts(count, chosen, sum(p.numel() for p in stacked) // count))
    return found
