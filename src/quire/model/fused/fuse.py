"""Installing fused forwards on the modules of a model, and taking them off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quire.model.fused.attention import FusedAttention, match_attention, rotary_table
from quire.model.fused.layer import FusedLayer, match_layer
from quire.model.fused.mlp import FusedMlp, match_mlp
from quire.model.fused.norm import RowNorm, match_norm

__all__ = ["Fused", "fuse"]

_KINDS = {"norm": RowNorm, "mlp": FusedMlp, "attention": FusedAttention, "layer": FusedLayer}


class Fused:
    """The fused forwards of one model.

    active: whether they serve now. proving: whether attention and layers compare themselves with the originals;
    `keep_proved` ends that. counts: how many modules of each kind are fused, by kind.
    """

    def __init__(self) -> None:
        self.active = False
        self.proving = True
        self._installed: list[tuple[nn.Module, FusedAttention | FusedLayer | FusedMlp | RowNorm]] = []

    @property
    def counts(self) -> dict[str, int]:
        return {
            name: sum(isinstance(part, kind) for _, part in self._installed) for name, kind in _KINDS.items()
        }

    def part_of(self, module: nn.Module) -> FusedAttention | FusedLayer | FusedMlp | RowNorm | None:
        """What serves for `module`."""
        return next((part for owner, part in self._installed if owner is module), None)

    def found(self, model: nn.Module) -> dict[str, dict[str, Any]] | None:
        """What the proof of `model` has found, JSON, for `fuse` of a later start: kind, module name, findings.

        None if some of it cannot be written down.
        """
        names = {module: name for name, module in model.named_modules()}
        found: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        for module, part in self._installed:
            kind = next(kind for kind, cls in _KINDS.items() if isinstance(part, cls))
            found[kind][names[module]] = True if isinstance(part, FusedLayer) else part.found
        return None if None in found["attention"].values() else found

    def keep_proved(self) -> None:
        """Ends the proof: attention and layers that did not pass get their own forwards back."""
        self.proving = False
        for module, part in list(self._installed):
            passed = not isinstance(part, FusedAttention | FusedLayer) or part.proved
            if isinstance(part, FusedLayer):
                passed = passed and part.attention.proved
            if not passed:
                self._uninstall(module, part)

    def restore(self) -> None:
        """Gives every module its own forward back. Done twice, nothing happens."""
        for module, part in list(self._installed):
            self._uninstall(module, part)

    def install_rows(self, module: nn.Module, part: RowNorm | FusedMlp) -> None:
        """`part`, proved, serves for `module`: rows in, rows out."""
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.active and len(args) == 1 and not kwargs and part.serves(args[0]):
                return part(args[0])
            return original(*args, **kwargs)

        self._install(module, part, forward)

    def install_attending(self, module: nn.Module, part: FusedAttention | FusedLayer) -> None:
        """`part` serves for `module` once it is proved: hidden rows in, and the cache among the keywords."""
        original = module.forward
        pair = isinstance(part, FusedAttention)  # it answers (rows, no weights)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and "hidden_states" not in kwargs:
                kwargs["hidden_states"], args = args[0], ()
            hidden, cache = kwargs.get("hidden_states"), kwargs.get("past_key_values")
            if not self.active or args or not part.serves(hidden, cache, kwargs.get("attention_mask")):
                return original(*args, **kwargs)
            # None where the table is not one it was proved for.
            table = rotary_table(kwargs.get("position_embeddings"), hidden.shape[1], hidden.dtype)  # type: ignore[union-attr]
            if self.proving:

                def again(rows: torch.Tensor = hidden) -> Any:  # type: ignore[assignment]  # served: a tensor
                    return original(**{**kwargs, "hidden_states": rows})

                return part.prove(hidden, cache, table, again)  # type: ignore[arg-type]
            if table is None:
                return original(**kwargs)
            rows = part(hidden, cache, table)  # type: ignore[arg-type]
            return (rows, None) if pair else rows

        self._install(module, part, forward)

    def _install(self, module: nn.Module, part: Any, forward: Any) -> None:
        module.__dict__["forward"] = forward
        self._installed.append((module, part))

    def _uninstall(self, module: nn.Module, part: Any) -> None:
        del module.__dict__["forward"]
        self._installed.remove((module, part))


def fuse(model: nn.Module, dtype: torch.dtype, found: dict[str, dict[str, Any]] | None = None) -> Fused:
    """Installs a fused forward on every module of `model` that has a known structure; its linear layers are packed.

    dtype: of the rows that pass through the model. found: what `Fused.found` gave after the proof of this very model:
    then those modules are fused, as they were, and nothing is left to be proved.
    """
    if found is not None:
        return _fuse_again(model, dtype, found)
    fused = Fused()
    norms: dict[nn.Module, RowNorm] = {}
    mlps: dict[nn.Module, FusedMlp] = {}
    attentions: dict[nn.Module, FusedAttention] = {}
    layers: list[tuple[nn.Module, FusedLayer]] = []
    modules = [module for module in model.modules() if "forward" not in module.__dict__]  # nobody's hook
    for module in modules:
        if (norm := match_norm(module, dtype)) is not None:
            norms[module] = norm
        elif (attention := match_attention(module)) is not None:
            attentions[module] = attention
        elif (mlp := match_mlp(module)) is not None:
            mlps[module] = mlp
    for module in modules:
        if (layer := match_layer(module, attentions, mlps, norms)) is not None:
            layers.append((module, layer))
    for module, part in [*norms.items(), *mlps.items()]:
        fused.install_rows(module, part)
    for module, part in [*attentions.items(), *layers]:
        fused.install_attending(module, part)
    return fused


def _fuse_again(model: nn.Module, dtype: torch.dtype, found: dict[str, dict[str, Any]]) -> Fused:
    fused = Fused()
    fused.proving = False
    modules = dict(model.named_modules())

    def matched(kind: str, match: Callable[[nn.Module, Any], Any]) -> dict[nn.Module, Any]:
        parts = {modules[name]: match(modules[name], what) for name, what in found[kind].items()}
        if None in parts.values():
            raise ValueError(f"expected every {kind} that was found before, got another structure")
        return parts

    norms = matched("norm", lambda module, what: match_norm(module, dtype, what))
    mlps = matched("mlp", match_mlp)
    attentions = matched("attention", match_attention)
    layers = matched("layer", lambda module, _: match_layer(module, attentions, mlps, norms))
    for module, part in [*norms.items(), *mlps.items()]:
        fused.install_rows(module, part)
    for module, part in [*attentions.items(), *layers.items()]:
        fused.install_attending(module, part)
    return fused
