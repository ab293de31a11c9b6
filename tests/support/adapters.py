"""Adds adapters to a transformers model, by its own methods, or by peft's if transformers requires a newer peft."""

from __future__ import annotations

from typing import Any

import peft
from peft.tuners.tuners_utils import BaseTunerLayer

__all__ = ["add_adapter", "disable_adapters", "enable_adapters", "set_adapter"]


def _takes_this_peft() -> bool:
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils.peft_utils import check_peft_version

    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError:
        return False
    return True


def add_adapter(model: Any, config: peft.LoraConfig, name: str) -> None:
    if _takes_this_peft():
        model.add_adapter(config, name)
        return
    peft.inject_adapter_in_model(config, model, name)
    set_adapter(model, name)


def set_adapter(model: Any, name: str) -> None:
    if _takes_this_peft():
        model.set_adapter(name)
        return
    for layer in _layers(model):
        layer.enable_adapters(True)
        layer.set_adapter(name)


def disable_adapters(model: Any) -> None:
    if _takes_this_peft():
        model.disable_adapters()
        return
    for layer in _layers(model):
        layer.enable_adapters(False)


def enable_adapters(model: Any) -> None:
    if _takes_this_peft():
        model.enable_adapters()
        return
    for layer in _layers(model):
        layer.enable_adapters(True)


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
