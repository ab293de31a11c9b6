"""Which modules somebody has put something on: hooks, or a forward of the object's own.

What is fused leaves calls of modules out, and hooks with them. So a module inside which there is a hook is not fused.
Not counted: hooks of Quire's own, and those that transformers leaves on layers to capture what `output_hidden_states`
asks for, which do nothing where nobody asks.

Cost: about 0.2 us a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["hooked", "hooks_on", "hooks_on_all", "may_be_replaced", "without_hooks"]

_torch_module: Any = nn.modules.module
_IDLE = ("quire.", "transformers.utils.output_capturing")


def hooks_on(module: nn.Module) -> list[Any]:
    """Forward hooks and pre-hooks of this very module, in their order."""
    if not (module._forward_hooks or module._forward_pre_hooks):
        return []
    return _counted([*module._forward_pre_hooks.values(), *module._forward_hooks.values()])


def hooks_on_all() -> list[Any]:
    """Those that torch calls for every module."""
    return _counted(
        [*_torch_module._global_forward_pre_hooks.values(), *_torch_module._global_forward_hooks.values()]
    )


def hooked(model: nn.Module) -> str | None:
    """Where the first hook is, in words; None where there is none."""
    if hooks_on_all():
        return "a hook for all modules (torch.nn.modules.module.register_module_forward_hook)"
    for name, module in model.named_modules():
        if found := hooks_on(module):
            text = getattr(found[0], "__qualname__", type(found[0]).__qualname__)
            return f"the hook {text} on {name or 'the model'}"
    return None


def may_be_replaced(module: nn.Module) -> bool:
    """Whether its forward may be replaced by one that calls none of the modules in it."""
    if "forward" in module.__dict__ or hooks_on_all():
        return False
    return not any(hooks_on(inner) or "forward" in inner.__dict__ for inner in _inside(module))


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, no module of `model` calls its forward hooks and pre-hooks. Those for all modules stay."""
    aside = [
        (hooks, dict(hooks))
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        if hooks
    ]
    for hooks, _ in aside:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in aside:
            hooks.update(kept)


def _inside(module: nn.Module) -> Iterable[nn.Module]:
    return (inner for inner in module.modules() if inner is not module)


def _counted(hooks: list[Any]) -> list[Any]:
    return [hook for hook in hooks if not (getattr(hook, "__module__", None) or "").startswith(_IDLE)]
