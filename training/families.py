"""The one table of model families: architecture, transformers classes, shapes.

Every model is a real hybrid of about 2.8 million parameters, so that its bf16 folder stays under 6 MB. GDN ties its
embeddings; the other two classes have no tied head, so their feed-forward part is smaller. The draft model is a tenth
of that: it guesses what the others will write, for speculative decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

WRITES = """A small model for examples, tests and demonstrations of ReplaySSM: it writes recognisable sentences in the manner of programming documentation. What it says
is not reliable and often does not make sense; greedy text soon repeats itself, so sample (temperature 0.8)."""

DRAFTS = """It guesses what gdn-tiny, mamba2-tiny and kda-tiny will write, for speculative decoding: they have the same tokenizer, and
a forward of it costs a fraction of one of theirs. Text of its own makes little sense."""

FULL_EVERY_4TH = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Family:
    """What ``--family NAME`` trains.

    ``model_type`` is the transformers module, ``config`` the keyword arguments of its config class, ``purpose`` what the
    card says the model is there for, ``neighbours`` who else ran on the device.
    """

    folder: str
    title: str
    model_type: str
    config_class: str
    model_class: str
    config: dict[str, Any] = field(default_factory=dict)
    purpose: str = WRITES
    neighbours: str = ", shared with the runs of the other two models"


_COMMON: dict[str, Any] = {
    "hidden_size": 160,
    "num_attention_heads": 4,
    "initializer_range": 0.04,
    "max_position_embeddings": 1024,
    "use_cache": True,
    # Token 0 ends and begins a text. pad_token_id stays unset: nn.Embedding would freeze that row.
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}

FAMILIES: dict[str, Family] = {
    "gdn": Family(
        folder="gdn-tiny",
        title="Gated DeltaNet hybrid (Qwen3.5 text architecture)",
        model_type="qwen3_5",
        config_class="Qwen3_5TextConfig",
        model_class="Qwen3_5ForCausalLM",
        config=_COMMON
        | {
            "intermediate_size": 304,
            "num_hidden_layers": 8,
            "layer_types": FULL_EVERY_4TH,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "mamba2": Family(
        folder="mamba2-tiny",
        title="Mamba-2 hybrid (Nemotron-H architecture, dense)",
        model_type="nemotron_h",
        config_class="NemotronHConfig",
        model_class="NemotronHForCausalLM",
        config=_COMMON
        | {
            "hybrid_override_pattern": "M-M-M*-M-M-M*-",
            "intermediate_size": 480,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 2,
            "chunk_size": 64,
            "rescale_prenorm_residual": False,
        },
    ),
    "kda": Family(
        folder="kda-tiny",
        title="Kimi Delta Attention hybrid (Kimi-Linear architecture, dense)",
        model_type="kimi_linear",
        config_class="KimiLinearConfig",
        model_class="KimiLinearForCausalLM",
        config=_COMMON
        | {
            "intermediate_size": 240,
            "num_hidden_layers": 8,
            "layer_types": FULL_EVERY_4TH,
            "mlp_layer_types": ["dense"] * 8,
            "num_key_value_heads": 4,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 48,
            "qk_rope_head_dim": 16,
            "v_head_dim": 64,
            "linear_head_dim": 64,
            "linear_num_heads": 3,
        },
    ),
    "draft": Family(
        folder="gdn-draft",
        title="Gated DeltaNet hybrid (Qwen3.5 text architecture), a draft model for the others",
        model_type="qwen3_5",
        config_class="Qwen3_5TextConfig",
        model_class="Qwen3_5ForCausalLM",
        config=_COMMON
        | {
            "hidden_size": 80,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 40,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
        purpose=DRAFTS,
        neighbours=", one core",
    ),
}


def build_model(name: str, vocab_size: int, **overrides: Any) -> torch.nn.Module:
    """A freshly initialised fp32 model of family ``name``; ``overrides`` replace single config values (for tests)."""
    import importlib

    family = FAMILIES[name]
    configuration = importlib.import_module(
        f"transformers.models.{family.model_type}.configuration_{family.model_type}"
    )
    modeling = importlib.import_module(f"transformers.models.{family.model_type}.modeling_{family.model_type}")
    config = getattr(configuration, family.config_class)(**(family.config | {"vocab_size": vocab_size} | overrides))
    config._attn_implementation = "sdpa"
    model = getattr(modeling, family.model_class)(config)
    if name in ("gdn", "draft"):
        _initialise_gdn_decay(model)
    return model


def set_half_lives(model: torch.nn.Module, shortest: float, longest: float) -> None:
    """Let the heads of each recurrent layer start with half-lives spread evenly, in orders of magnitude, over a range.

    log decay = -exp(A_log) step, step = softplus(input + dt_bias): dt_bias gives a step of 0.1 where the input is 0, and
    A_log ``[heads]`` the rest.
    """
    step = 0.1
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "dt_bias") and hasattr(module, "A_log"):
                lives = torch.logspace(math.log10(shortest), math.log10(longest), module.A_log.numel())
                module.A_log.copy_((math.log(2) / (lives * step)).log().reshape(module.A_log.shape))
                module.dt_bias.fill_(step + math.log(-math.expm1(-step)))


def _initialise_gdn_decay(model: torch.nn.Module) -> None:
    """Start with memories of 10 to 1,000 tokens and more: the default (dt_bias = 1) forgets within a few tokens.

    dt_bias ``[Hv]`` is the inverse softplus of a step drawn log-uniformly from [1e-3, 1e-1], A is uniform in [1, 16].
    """
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "dt_bias") and hasattr(module, "A_log"):
                step = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
                module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1, 16).log())
