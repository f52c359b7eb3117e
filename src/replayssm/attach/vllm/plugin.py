"""What is registered with vLLM, and where its own code asks for it."""

from __future__ import annotations

import functools
from typing import Any

from replayssm.attach.vllm import options
from replayssm.recurrences.base import Recurrence
from replayssm.recurrences.engine import EngineBinding, engine_bindings

_done = False


def register() -> None:
    """Register our layers, and let vLLM's configuration know what replay needs. Once per process.

    Versions outside the range are left alone here: the first engine that asks for replay is told. Nothing that can fail
    comes after the first change, so that a registration that failed can be tried again.
    """
    global _done
    if _done:
        return
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry

    layers = _layers() if options.version_refusal() is None else {}
    _check_configurations(EngineArgs)
    if layers:
        from vllm.model_executor.custom_op import PluggableLayer

        for name, layer in layers.items():
            PluggableLayer.register_oot(layer, name=name)
        _size_states(type(ModelRegistry))
    _done = True


def _layers() -> dict[str, Any]:
    """Our subclass of each of vLLM's layers, by that one's name."""
    from replayssm.attach.vllm.layers import replayed

    return {binding.layer.partition(":")[2]: replayed(recurrence, binding) for recurrence, binding in engine_bindings()}


def _check_configurations(arguments: Any) -> None:
    """Refuse what cannot be replayed when a configuration is made, before any process is started for it."""
    create = arguments.create_engine_config

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = create(self, *args, **kwargs)
        options.require_supported(vllm_config)
        return vllm_config

    arguments.create_engine_config = create_engine_config


def _size_states(registry: Any) -> None:
    """Let model classes size pages as their layers do; vLLM imports them one by one, when it needs them."""
    resolve = registry.resolve_model_cls
    by_name = {name: (r, binding) for r, binding in engine_bindings() for name in binding.architectures}

    @functools.wraps(resolve)
    def resolve_model_cls(self: Any, *args: Any, **kwargs: Any) -> Any:
        model_class, architecture = resolve(self, *args, **kwargs)
        if architecture in by_name and "_replay_sized" not in vars(model_class):
            _size(model_class, *by_name[architecture])
        return model_class, architecture

    registry.resolve_model_cls = resolve_model_cls


def _size(model_class: Any, recurrence: Recurrence, binding: EngineBinding) -> None:
    from replayssm.attach.vllm import pages

    shape, dtype = model_class.get_mamba_state_shape_from_config, model_class.get_mamba_state_dtype_from_config

    def get_mamba_state_shape_from_config(cls: Any, vllm_config: Any) -> Any:
        stock, config = tuple(shape(vllm_config)), options.config_of(vllm_config)
        if config is None:
            return stock
        layout = pages.layout_of(recurrence, config, stock, vllm_config.model_config.dtype)
        return pages.shapes_of(layout, stock)

    def get_mamba_state_dtype_from_config(cls: Any, vllm_config: Any) -> Any:
        stock = tuple(dtype(vllm_config))
        return stock if options.config_of(vllm_config) is None else pages.dtypes_of(stock)

    model_class._replay_sized = True
    model_class.get_mamba_state_shape_from_config = classmethod(get_mamba_state_shape_from_config)
    model_class.get_mamba_state_dtype_from_config = classmethod(get_mamba_state_dtype_from_config)
