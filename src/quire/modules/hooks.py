"""Modules that carry hooks or a replaced forward.

A fused forward skips the calls of inner modules, and their hooks with them. So a module with a hook inside is not
fused. Ignored: Quire's own hooks, and the hooks that transformers leaves on layers to capture `output_hidden_states`,
which do nothing unless requested.

Cost: about 0.2 us a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["first_hook", "global_hooks", "hooks_on", "may_be_replaced", "without_hooks"]

_torch_module: Any = nn.modules.module
_IDLE = ("quire.", "transformers.utils.output_capturing")


def hooks_on(module: nn.Module) -> list[Any]:
    """Forward hooks and pre-hooks registered on this module itself, in their order."""
    if not (module._forward_hooks or module._forward_pre_hooks):
        return []
    return _without_idle([*module._forward_pre_hooks.values(), *module._forward_hooks.values()])


def global_hooks() -> list[Any]:
    """Hooks that torch calls for every module."""
    return _without_idle(
        [*_torch_module._global_forward_pre_hooks.values(), *_torch_module._global_forward_hooks.values()]
    )


def first_hook(model: nn.Module) -> str | None:
    """Description of the first hook and its module; None without hooks."""
    if global_hooks():
        return "a hook for all modules (torch.nn.modules.module.register_module_forward_hook)"
    for name, module in model.named_modules():
        if hooks := hooks_on(module):
            text = getattr(hooks[0], "__qualname__", type(hooks[0]).__qualname__)
            return f"the hook {text} on {name or 'the model'}"
    return None


def may_be_replaced(module: nn.Module) -> bool:
    """Whether the module's forward may be replaced by one that calls no inner module."""
    if "forward" in module.__dict__ or global_hooks():
        return False
    return not any(hooks_on(inner) or "forward" in inner.__dict__ for inner in _inside(module))


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, no module of `model` calls its forward hooks and pre-hooks. Hooks for all modules stay."""
    removed = [
        (hooks, dict(hooks))
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        if hooks
    ]
    for hooks, _ in removed:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in removed:
            hooks.update(entries)


def _inside(module: nn.Module) -> Iterable[nn.Module]:
    return (inner for inner in module.modules() if inner is not module)


def _without_idle(hooks: list[Any]) -> list[Any]:
    return [hook for hook in hooks if not (getattr(hook, "__module__", None) or "").startswith(_IDLE)]
