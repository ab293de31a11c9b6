"""Installs fused forwards on the modules of a model, and removes them again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from quire.attention import AttentionOptions
from quire.memory.heap import give_back_freed
from quire.model.cache_keyword import cache_keyword, given_cache
from quire.model.fused.attention import FusedAttention, match_attention, rotary_table
from quire.model.fused.layer import FusedLayer, match_layer
from quire.model.fused.mixer import FusedMixer, mixer_candidates
from quire.model.fused.mlp import FusedMlp, mlp_candidates
from quire.model.fused.norm import RowNorm, norm_candidates
from quire.model.prove.fused_proof import Proof, ProofResult
from quire.model.prove.fused_state_proof import StateProof
from quire.model.prove.model import ModelToProve
from quire.model.prove.recorded_calls import record
from quire.model.state import StateAdapter
from quire.modules.equal_modules import kind_of
from quire.modules.hooks import may_be_replaced
from quire.modules.module_patch import current_method, patch_methods

__all__ = ["Fused", "fuse", "fuse_again"]

_KINDS = {
    "norm": RowNorm,
    "mlp": FusedMlp,
    "attention": FusedAttention,
    "mixer": FusedMixer,
    "layer": FusedLayer,
}
_Part = FusedAttention | FusedMixer | FusedLayer | FusedMlp | RowNorm
_Answer = TypeVar("_Answer")


class Fused:
    """The fused forwards of one model.

    active: whether they serve now, in this thread. counts: number of fused modules by kind.
    """

    def __init__(self) -> None:
        self._thread_state = threading.local()
        self._installed: list[tuple[nn.Module, _Part]] = []
        self._undo: dict[nn.Module, Callable[[], None]] = {}

    @property
    def active(self) -> bool:
        return getattr(self._thread_state, "active", False)

    @active.setter
    def active(self, value: bool) -> None:
        self._thread_state.active = value

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Inside, in this thread, the fused forwards serve."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    @property
    def counts(self) -> dict[str, int]:
        return {
            name: sum(isinstance(part, kind) for _, part in self._installed) for name, kind in _KINDS.items()
        }

    def part_of(self, module: nn.Module) -> _Part | None:
        """The fused part that serves for `module`."""
        return next((part for owner, part in self._installed if owner is module), None)

    def findings(self, model: nn.Module) -> dict[str, dict[str, Any]] | None:
        """The proof's decisions about `model` as JSON, for `fuse_again` at a later start: kind, module name, finding.

        None if one of them cannot be written down.
        """
        names = {module: name for name, module in model.named_modules()}
        findings: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        for module, part in self._installed:
            kind = next(kind for kind, cls in _KINDS.items() if isinstance(part, cls))
            findings[kind][names[module]] = True if isinstance(part, FusedLayer) else part.finding
        return None if None in findings["attention"].values() else findings

    def restore(self) -> None:
        """Gives every module its own forward back. A second call does nothing."""
        for module, part in list(self._installed):
            self._uninstall(module, part)

    def install(
        self,
        norms: Mapping[nn.Module, RowNorm],
        mlps: Mapping[nn.Module, FusedMlp],
        attentions: Mapping[nn.Module, FusedAttention],
        mixers: Mapping[nn.Module, FusedMixer],
        layers: Mapping[nn.Module, FusedLayer],
    ) -> None:
        """Installs proved parts on their modules."""
        for module, part in [*norms.items(), *mlps.items()]:
            self._install_rows(module, part)
        for module, part in [*attentions.items(), *mixers.items(), *layers.items()]:
            self._install_attending(module, part)

    def _install_rows(self, module: nn.Module, part: RowNorm | FusedMlp) -> None:
        """`part` serves for `module`: it maps rows to rows."""
        original = current_method(module, "forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.active and len(args) == 1 and not kwargs and part.serves(args[0]):
                return part(args[0])
            return original(*args, **kwargs)

        self._install(module, part, forward)

    def _install_attending(self, module: nn.Module, part: FusedAttention | FusedMixer | FusedLayer) -> None:
        """`part` serves for `module`: it takes hidden rows, and the cache among the keywords."""
        original = current_method(module, "forward")
        keyword = cache_keyword(original)
        pair = isinstance(part, FusedAttention)  # it returns (rows, no weights)
        within = part.attention if isinstance(part, FusedLayer) else part
        turns = isinstance(within, FusedAttention)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and "hidden_states" not in kwargs:
                kwargs["hidden_states"], args = args[0], ()
            hidden, cache = kwargs.get("hidden_states"), given_cache(keyword, kwargs)
            if not self.active or args or not part.serves(hidden, cache, kwargs.get("attention_mask")):
                return original(*args, **kwargs)
            # None for a table of a form that was not proved.
            embeddings = kwargs.get("position_embeddings") if turns else None
            table = rotary_table(embeddings, hidden.shape[1], hidden.dtype)  # type: ignore[union-attr]
            if table is None:
                return original(**kwargs)
            rows = part(hidden, cache, table)  # type: ignore[arg-type]
            return (rows, None) if pair else rows

        self._install(module, part, forward)

    def _install(self, module: nn.Module, part: Any, forward: Any) -> None:
        self._undo[module] = patch_methods(module, forward=forward)
        self._installed.append((module, part))

    def _uninstall(self, module: nn.Module, part: Any) -> None:
        self._undo.pop(module)()
        self._installed.remove((module, part))


def fuse(
    prepared: ModelToProve,
    attended: Mapping[nn.Module, tuple[int, AttentionOptions]],
    adapters: Mapping[int, StateAdapter],
) -> Fused:
    """Installs a fused forward on every module of the model that has a known structure and is proved (`fused_proof`).

    attended: layer and settings of each module that called attention. adapters: of state layers, by layer.
    """
    model, dtype = prepared.loaded.model, prepared.loaded.dtype
    modules = [module for module in model.modules() if may_be_replaced(module)]
    norms = [module for module in modules if norm_candidates(module, dtype)]
    mlps = [module for module in modules if module not in norms and mlp_candidates(module)]
    attention_layers = [module for module in modules if any(child in attended for child in module.children())]
    mixers = {adapter.module: layer for layer, adapter in adapters.items() if may_be_replaced(adapter.module)}
    state_layers = [module for module in modules if any(child in mixers for child in module.children())]
    layers_of = {module: layer for module, (layer, _) in attended.items()}
    settings_of = dict(attended.values())
    for module in attention_layers:
        layers_of[module] = next(layers_of[child] for child in module.children() if child in attended)

    def kind(module: nn.Module) -> Hashable:
        layer = layers_of.get(module)
        if layer is None:
            return kind_of(module)
        settings = settings_of[layer]
        conditions = (
            settings.scale,
            settings.window,
            settings.chunk,
            settings.softcap,
            settings.sinks is None,
        )
        return kind_of(module, prepared.spec.layers[layer], *conditions)

    tested = [
        *norms,
        *mlps,
        *(module for module in modules if module in attended),
        *attention_layers,
        *mixers,
        *state_layers,
    ]
    first_of = {kind(module): module for module in reversed(tested)}
    near, far = record(prepared, first_of.values(), layers_of)
    proof, result = Proof(prepared, near, far), ProofResult()

    def for_each_kind(
        kinds: Iterable[nn.Module], ask: Callable[[nn.Module], _Answer]
    ) -> dict[nn.Module, _Answer]:
        """The answers of `ask` for all modules, each kind of equal modules asked once."""
        answers: dict[Hashable, _Answer] = {}
        for module in (kinds := list(kinds)):
            if kind(module) not in answers:
                answers[kind(module)] = ask(module)
                give_back_freed()  # weights in float32, which would add to those of the next kind
        return {module: answers[kind(module)] for module in kinds}

    result.norms.update(_known(for_each_kind(norms, proof.norm)))
    result.mlps.update(_known(for_each_kind(mlps, proof.mlp)))
    row_norms = {module: norm_candidates(module, dtype)[name] for module, name in result.norms.items()}
    candidates = {}
    for module, (layer, options) in attended.items():
        part = match_attention(module, row_norms) if may_be_replaced(module) else None
        if part is not None and part.fit(layer, options, prepared.spec.layers[layer]):
            candidates[module] = part
    turns = for_each_kind(
        candidates, lambda module: proof.attention(module, candidates[module], result.norms)
    )
    for module, rotation in _known(turns).items():
        candidates[module].rotation = rotation
        result.attentions[module] = candidates[module]
    fused_mlps = {module: mlp_candidates(module)[order] for module, order in result.mlps.items()}
    states = StateProof(prepared, near)
    gates = _known(
        for_each_kind(mixers, lambda module: states.mixer(adapters[mixers[module]], mixers[module]))
    )
    fused_mixers = {
        module: mixer_candidates(adapters[mixers[module]], mixers[module])[gates[module]] for module in gates
    }
    layers = {}
    for module in dict.fromkeys([*attention_layers, *state_layers]):
        part = match_layer(module, {**result.attentions, **fused_mixers}, fused_mlps, row_norms)
        if part is not None:
            layers[module] = part

    def is_proved(module: nn.Module) -> bool:
        mixer = layers[module].attention
        if isinstance(mixer, FusedMixer):
            return states.layer(module, mixer, result.norms, result.mlps)
        return proof.layer(module, result)

    proved = for_each_kind(layers, is_proved)
    fused = Fused()
    fused.install(
        row_norms,
        fused_mlps,
        result.attentions,
        fused_mixers,
        {module: layer for module, layer in layers.items() if proved[module]},
    )
    return fused


def _known(answers: Mapping[nn.Module, _Answer | None]) -> dict[nn.Module, _Answer]:
    return {module: answer for module, answer in answers.items() if answer is not None}


def fuse_again(
    model: nn.Module,
    dtype: torch.dtype,
    findings: Mapping[str, Mapping[str, Any]],
    adapters: Mapping[int, StateAdapter],
) -> Fused:
    """Fuses the same modules in the same way, from `Fused.findings` after the proof of this same model."""
    modules = dict(model.named_modules())

    def matched(kind: str, match: Callable[[nn.Module, Any], _Answer | None]) -> dict[nn.Module, _Answer]:
        parts = {modules[name]: match(modules[name], finding) for name, finding in findings[kind].items()}
        known = _known(parts)
        if len(known) < len(parts):
            raise ValueError(f"expected every {kind} of the earlier proof to match, got another structure")
        return known

    norms = matched("norm", lambda module, finding: norm_candidates(module, dtype).get(finding))
    mlps = matched("mlp", lambda module, finding: mlp_candidates(module).get(finding))
    attentions = matched("attention", lambda module, finding: match_attention(module, norms, finding))
    layer_of = {adapter.module: layer for layer, adapter in adapters.items()}
    mixers = matched(
        "mixer",
        lambda module, finding: mixer_candidates(adapters[layer_of[module]], layer_of[module]).get(finding),
    )
    attending = {**attentions, **mixers}
    layers = matched("layer", lambda module, _: match_layer(module, attending, mlps, norms))
    fused = Fused()
    fused.install(norms, mlps, attentions, mixers, layers)
    return fused
