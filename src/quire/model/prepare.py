"""A loaded model, made ready to run on the paged cache, and given back as it was.

Preparation holds rotary embeddings still (`rope`), packs the linear layers (`linear`) and the experts of a mixture
(`experts`), and proves by a probe that the model so prepared answers as it did before (`probe`). The native back end
also has every operator made a function of its row alone (`row_invariant`), which takes a second probe where something
had to be replaced. The attention function is switched in only while `forward`
runs, so between steps the model is an ordinary one. It stands in the model's configs, which all threads see: whoever
runs the model in other threads meanwhile holds `lock`.
Not an engine: it computes one step for somebody who has allotted the slots.

Invariants
    R1  after `restore()` the model is as it came: same modules, same attention implementation, same buffers.
    R2  every answer comes from a model the probe has passed, now or, with packed weights kept, in an earlier start with
        everything the same (`saved_proof`).

Cost: `forward` is the model's own forward plus a few microseconds; preparation is one pass over the modules and the
probe's eleven small forwards, or none of them where a proof was kept.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from quire.attention import AttentionOptions, Device, device_of
from quire.errors import ArgumentError, LoadError, UnsupportedModelError
from quire.load_progress import observer
from quire.memory.block_bytes import BlockStorage
from quire.memory.heap import give_back_freed
from quire.memory.storage import Storage
from quire.model import attention_function, rope, row_invariant
from quire.model.attention_patch import AttentionPatch, has_biases, route
from quire.model.cache_keyword import cache_keyword
from quire.model.experts import pack_experts
from quire.model.huge_pages import HugePageMove
from quire.model.latent import install_latents
from quire.model.linear import choose_packing, pack_linears, packing_on, weights_to_pack
from quire.model.load import LoadedModel, UnloadedModel
from quire.model.model_lock import hold, let_go
from quire.model.module_patch import below, install
from quire.model.paged_cache import PagedCache, paged_cache_class
from quire.model.prove.generated_tokens import check_generate
from quire.model.prove.hooks import hooks_on, may_be_replaced
from quire.model.prove.latent_proof import prove_latents
from quire.model.prove.model_probe import Probe, run_probe_steps
from quire.model.prove.model_record import ModelRecord, facts
from quire.model.prove.replaced_operators import first_unproved, one_of_each_kind
from quire.model.quantized import coded_weights
from quire.model.saved_check import SavedChecks
from quire.model.saved_linears import SavedLinears
from quire.model.saved_proof import SavedProof
from quire.model.saved_weights import SavedWeights
from quire.model.state import StateAdapter
from quire.model.state.serve_states import find_states, serve_states
from quire.model.torch_timing import Record, watch_attention, watch_linears
from quire.model.unsupported import what_is_missing, why_not_called
from quire.process import ForkSafeLock
from quire.saved_folder import SavedFolder
from quire.spec.model_config import longest_of
from quire.step import ForwardStep
from quire.torch_threads import one_torch_thread

if TYPE_CHECKING:
    from quire.model.fused import Fused, FusedDecoder

__all__ = ["PreparedModel", "resolve_length"]

_IMPLEMENTATION = "_attn_implementation_internal"  # where transformers' configs keep the attention's name


class PreparedModel:
    """The model of `loaded`, ready for `forward`.

    Args:
        loaded: what `quire.model.load` gave.
        backend: "python", "native", one that was registered (`quire.attention.devices`), or None for the best there
            is.
        max_model_len: longest sequence that will be run. Not given: the model's own, or, for rotary embeddings that
            switch with the length (longrope, dynamic), the length up to which they do not. A longer one holds the long
            frequencies for all sequences.
        packed_weights: a folder that keeps the packed form of weights (`saved_weights`), and what the proof of a model
            found (`saved_proof`).

    Raises:
        ArgumentError: another one has prepared this very model and was not given back (`model_lock`).
        UnsupportedModelError: the model cannot be run exactly, with its type and the reason; it is left as it was.
    """

    by_own_forward = (
        False  # whether the model's own attention runs, a sequence at a time (`sequential_model`)
    )
    needs = frozenset({"input_ids", "position_ids"})  # what its forward has to take, beside a cache

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        backend: str | None = None,
        max_model_len: int | None = None,
        packed_weights: SavedFolder | None = None,
    ) -> None:
        self.device: Device = device_of(backend)
        if loaded.dtype not in self.device.dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.device.dtypes)
            raise ArgumentError(
                f"expected a model of {known} for backend {self.device.name!r}, got {loaded.dtype}; "
                "choose it with `dtype`"
            )
        self._asked_length = max_model_len
        self._cache: PagedCache | None = None
        self._record: Record | None = None
        self.lock = ForkSafeLock()  # for who runs the model in several threads; nobody else needs it
        self._prepare(loaded, packed_weights)

    def _prepare(self, loaded: LoadedModel, packed_weights: SavedFolder | None) -> None:
        self.loaded = loaded
        self.spec = loaded.spec
        # By layer, what is taken off keys that are kept in codes (`quire.model.key_offsets`).
        self.key_offsets: dict[int, torch.Tensor] = {}
        self.vocab_size = loaded.vocab_size
        self.max_model_len = resolve_length(loaded, self._asked_length)
        self.rotary_note = rope.note(loaded.model, self.max_model_len, loaded.max_model_len)
        self._model: PreTrainedModel = loaded.model
        self._watch: row_invariant.Recorder | None = None
        self._proof: SavedProof | None = None
        self._kept_pages: list[np.ndarray] = []  # the files that packed weights are mapped from
        self.packed_check: SavedChecks | None = None
        self._read_from(loaded.kept)
        self._undo: list[Callable[[], None]] = []
        self._latents: dict[torch.nn.Module, Any] = {}  # of all caches; see `PagedCache.latents`
        self._adapters: Mapping[int, StateAdapter] = {}  # of state layers, by layer
        self.fused: Fused | None = None
        self.decoder: FusedDecoder | None = None
        self.routed: AttentionPatch | None = None
        # States know their place in a text: no layer without attention asks for a position.
        self._attends = any(layer.attends for layer in loaded.spec.layers)
        no_positions = not self._attends or has_biases(loaded.model)
        needs = self.needs - {"position_ids"} if no_positions else self.needs
        self._parameters, self._cache_keyword = self._read_forward(loaded, needs)
        self._configs = _attention_configs(loaded.model)
        self._switched_from: list[Any] | None = None  # the configs' own attention, while it is another one
        _prepared.add(self)
        attention_function.register()
        hold(loaded.model, self, self._undo)
        try:
            with self._threads(), torch.autocast("cpu", enabled=False):
                self._give_back_training = _eval(loaded.model)
                self._undo.append(self._give_back_training)
                observer().begins("packing weights")
                self._change(loaded.model, packed_weights)
                if self._attends and (self.routed is None or not self.routed.no_positions):
                    _forward_parameters(loaded, self.needs)
                before = facts(loaded.model)
                observer().begins("proving the model")
                self._prove(loaded.model)
                if not may_be_replaced(loaded.model) or hooks_on(loaded.model):
                    self.decoder = None  # it calls no module, and would leave out what is on one
            now = facts(loaded.model)
            volatile = frozenset(name for name in before if before[name] != now.get(name))
            self.model_record = ModelRecord(loaded.model, now, volatile)
        except UnsupportedModelError as error:
            self.restore()
            missing = None if self.by_own_forward else what_is_missing(loaded.model)
            if missing is None:
                raise
            raise UnsupportedModelError(
                f"model type {loaded.model_type}: {missing}; such models come in a later version"
            ) from error
        except BaseException:
            self.restore()
            raise

    @property
    def by_token(self) -> bool:
        """Whether a forward has one token, of a prompt too (`sequential_model`, `recurrent_model`)."""
        return False

    def _read_forward(self, loaded: LoadedModel, needs: frozenset[str]) -> tuple[frozenset[str], str]:
        """What the model's forward takes, and what it calls the cache.

        *raises:* UnsupportedModelError: it does not take `needs` and a cache.
        """
        return _forward_parameters(loaded, needs)

    def prepare_again(self, loaded: LoadedModel, storage: Storage) -> None:
        """Follow what has been changed about the model: undo everything, prepare and prove it as it is now, and run on
        `storage` again.

        *raises:* as the constructor; the model is then as it would be without Quire, and this runs nothing.
        """
        self.restore()
        self._prepare(loaded, None)
        self.attach(storage)
        if self._record is not None:
            self.watch(self._record)

    def give_back_training(self) -> None:
        """Have the model's modules in the mode, training or not, that they were in; `restore` does so else."""
        self._give_back_training()

    def attach(
        self,
        storage: Storage | None,
        attended: dict[torch.nn.Module, tuple[int, AttentionOptions]] | None = None,
    ) -> None:
        """Run on `storage` from now on; its spec must be this model's. None lets go of it.

        attended: is told layer and settings of each module of the model that calls attention.
        """
        if self._cache is not None:
            self._cache.close()
        self._cache = None if storage is None else self.cache_over(storage)
        if self._cache is not None:
            self._cache.attended = attended

    def cache_over(self, storage: Storage) -> PagedCache:
        """What `forward` may be given for a step on `storage`, whose spec must be this model's."""
        self.check_storage(storage)
        states = storage.states if isinstance(storage, BlockStorage) else None
        made = paged_cache_class(self.loaded.model)
        cache = made(storage.spec, storage, self.device, self.loaded.model_type, states)
        cache.latents, cache.key_offsets = self._latents, self.key_offsets
        return cache

    def check_storage(self, storage: Storage) -> None:
        """*raises:* ArgumentError: it is of another spec than this model's; formats are the storage's own."""
        if storage.spec.in_model_dtype.layers != self.spec.layers:
            raise ArgumentError("expected a storage built from this model's spec, got one of another spec")
        if self.spec.states and not (isinstance(storage, BlockStorage) and storage.states):
            raise ArgumentError("expected a storage with state slots for a model with state layers, got none")

    @property
    def num_attended(self) -> int:
        """Attention calls that read pages in the last forward."""
        return 0 if self._cache is None else self._cache.num_attended

    def forward(self, step: ForwardStep, cache: PagedCache | None = None) -> torch.Tensor:
        """Compute a step: K and V of its tokens are in their slots afterwards.

        Args:
            step: in host memory.
            cache: over the storage of the step; not given, over the one that is attached.

        Returns:
            [R, vocab_size] in the model's dtype, the next-token logits of `step.logits_rows`, in host memory.

        Raises:
            LoadError: kept packed weights were found to be others than were written (`saved_check`).
        """
        if self.packed_check is not None and self.packed_check.damage is not None:
            raise LoadError(self.packed_check.damage)
        cache = self._cache if cache is None else cache
        if cache is None:
            raise ArgumentError("expected a storage, got none; call PreparedModel.attach first")
        if not self.device.is_host:
            return self.device.to_host(self._forward(step.on_device(self.device.to_device), cache))
        return self._forward(step, cache)

    def _forward(self, step: ForwardStep, cache: PagedCache) -> torch.Tensor:
        cache.begin(step)
        try:
            if self.decoder is not None and (logits := self.decoder(step, cache)) is not None:
                return logits
            with (
                row_invariant.serving(),
                nullcontext() if self.fused is None else self.fused.serving(),
                torch.inference_mode(),
                self._switched(),
                self._threads(),
                self._watch or nullcontext(),
            ):
                return self._own_forward(step, cache)
        finally:
            cache.end()

    def _own_forward(self, step: ForwardStep, cache: PagedCache) -> torch.Tensor:
        """The logits of a step by the model's own forward."""
        keeps = "logits_to_keep" in self._parameters
        arguments: dict[str, Any] = {self._cache_keyword: cache}
        if keeps:
            arguments["logits_to_keep"] = step.logits_rows
        if self.routed is not None and self.routed.mask is not None:
            arguments["attention_mask"] = self.routed.mask
        output = self._model(
            input_ids=step.input_ids[None],
            use_cache=True,
            **self._positions(step.position_ids[None]),
            **arguments,
        )
        return output.logits[0] if keeps else output.logits[0][step.logits_rows]

    @contextmanager
    def from_pages(self) -> Iterator[None]:
        """Within it the model's modules attend to what the pages of the cache they are given hold."""
        with torch.inference_mode(), self._switched():
            yield

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Within it the model's forwards attend by its own eager attention; nothing is recorded for gradients."""
        with torch.inference_mode(), self._switched("eager"):
            yield

    def own_logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, cache: Cache, *, eager: bool = False
    ) -> torch.Tensor:
        """The model's own answer for sequences int64 [n, T], or one of [T]: [n, T, vocab_size].

        Linear layers and rotary embeddings are the prepared ones, no module is fused. The attention is the one that
        `generate` computes where nobody chose another (sdpa for most, which may attend otherwise than eager), or eager.
        """
        with self.eagerly() if eager else torch.inference_mode():
            return self._model(
                input_ids=input_ids.reshape(-1, positions.numel()),
                use_cache=True,
                **self._positions(positions[None]),
                **{self._cache_keyword: cache},
            ).logits

    def _positions(self, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Nothing for a forward that takes none: biases on the scores say the positions (`routed`)."""
        return {"position_ids": position_ids} if "position_ids" in self._parameters else {}

    def watch(self, record: Record) -> None:
        """Have `record` told of linear layers and attention that torch computes, on the storage attached now."""
        if self._cache is None:
            raise ArgumentError("expected a storage, got none; call PreparedModel.attach first")
        self._cache.backend = watch_attention(self.device, record)
        self._record = record
        self._undo.append(watch_linears(self._model, record))

    def move_to_huge_pages(self, spare_bytes: int) -> HugePageMove | None:
        """Begin to move packed weights that are mapped from files to memory of this process, in huge pages.

        Only where that leaves as much free: spare_bytes is what this process can still use beside
        the files, and has no other use for.
        None where it is not begun. Not what the weights are, nor where: only how fast they are read.
        """
        files, self._kept_pages = self._kept_pages, []
        if not files or sum(pages.size for pages in files) > spare_bytes:
            return None
        return HugePageMove(*files)

    def restore(self) -> None:
        """Make the model what it was before. Done twice, nothing happens."""
        self._kept_pages = []
        self._cache = self.decoder = self.packed_check = None
        self._latents.clear()
        while self._undo:
            self._undo.pop()()
        let_go(self._model, self)

    def _change(self, model: PreTrainedModel, packed_weights: SavedFolder | None) -> None:
        if self.spec.has_indexer:
            layers = [layer.index_of for layer in self.spec.layers if layer.index_of is not None]
            raise UnsupportedModelError(
                f"model type {self.loaded.model_type}: expected layers that attend to all tokens or to a window, got "
                f"{len(layers)}, layer {layers[0]} first, that choose them by an indexer (DSA)"
            )
        if self.spec.states:
            self._adapters = find_states(self.loaded, self.spec, self.device)
        self._undo.append(rope.freeze(model, self.max_model_len))
        packing = packing_on(self.device)
        if packing is not None:
            release = None if self.loaded.mapped is None else self.loaded.mapped.release
            self._undo.append(pack_linears(model, packing, release=release, pack=self.device.pack))
        else:
            undo, kept = _pack_linears(self.loaded, packed_weights)
            self._undo.append(undo)
            if kept is not None and packed_weights is not None:
                files = (*self.loaded.kept, kept)
                self._read_from(files)
                paths = [one.path for one in files if one.pages is not None]
                codes_are_kept = all(weight.is_saved for weight in coded_weights(model).values())
                are_all_kept = codes_are_kept and all(one.holds_all for one in files)
                if self.device.is_native and are_all_kept and paths:
                    self._proof = SavedProof.of(packed_weights, paths, self.loaded, self.max_model_len)
        if self._adapters:
            are_proved = self._proof is not None and self._proof.found is not None
            self._undo.append(serve_states(self.loaded, self._adapters, are_proved=are_proved))
        if self.device.is_native:
            self._undo.append(pack_experts(model))
        if (routed := route(model)) is not None:
            self.routed = routed
            self._undo.append(routed.undo)
        if any(layer.latent for layer in self.spec.layers):
            self._undo.append(install_latents(model, self.loaded.model_type))

    def _read_from(self, kept: Sequence[SavedWeights]) -> None:
        """Have it known that weights are read from these files, as far as they are there."""
        self._kept_pages = [one.pages for one in kept if one.pages is not None]
        checks = [one.check for one in kept if one.check is not None]
        self.packed_check = SavedChecks(checks) if checks else None

    def _prove(self, model: PreTrainedModel) -> None:
        """Prove what serves, or take what an earlier proof found; keep what this one finds."""
        proof = self._proof
        if proof is not None and proof.found is not None:
            self._take(model, proof.found)
            return
        attended: dict[torch.nn.Module, tuple[int, AttentionOptions]] = {}
        run_probe_steps(self, attended)
        latents = {module: layer for module, (layer, _) in attended.items() if self.spec.layers[layer].latent}
        if latents:
            prove_latents(self, latents)
            attended = {module: found for module, found in attended.items() if module not in latents}
        if self.device.is_native and choose_packing(self.loaded.dtype) == "native":
            from quire.model.fused import fuse

            self.fused = fuse(self, attended, self._adapters)
            self._undo.append(self.fused.restore)
        give_back_freed()
        replaced = self._probe(model)
        fused = None if self.fused is None else self.fused.findings(model)
        if proof is not None and fused is not None:
            names = {module: name for name, module in model.named_modules()}
            proof.keep({
                "fused": fused,
                "replaced": [names[module] for module in replaced],
                "decoder": self.decoder is not None,
            })  # fmt: skip

    def _take(self, model: PreTrainedModel, found: dict[str, Any]) -> None:
        """Serve as an earlier proof of this very model has found."""
        from quire.model.fused import fuse_again, match_decoder

        self.fused = fuse_again(model, self.loaded.dtype, found["fused"], self._adapters)
        self._undo.append(self.fused.restore)
        if replaced := [model.get_submodule(name) for name in found["replaced"]]:
            self._undo.append(row_invariant.replace(model, replaced))
        if found["decoder"]:
            self.decoder = match_decoder(model, self.fused)

    def _probe(self, model: PreTrainedModel) -> list[torch.nn.Module]:
        """Compare the logits of what serves; with the native back end, find and replace what is not row-invariant.

        Returns the modules whose forward was replaced.
        """
        probe = Probe(self, needs_float64=not self.spec.states)
        if not self.device.is_native:
            probe.require(run_probe_steps(self))
            check_generate(self.loaded, probe)
            return []
        self._watch = row_invariant.Recorder(model)
        try:
            logits = run_probe_steps(self)
            modules = list(self._watch.modules)
        finally:
            self._watch = None
        probe.require(logits)
        check_generate(self.loaded, probe)
        if modules:
            own = {module: below(module, "forward") for module in one_of_each_kind(modules)}
            self._undo.append(row_invariant.replace(model, modules))
            if (module := first_unproved(self, own)) is not None:
                raise UnsupportedModelError(
                    f"model type {self.loaded.model_type}: expected {type(module).__name__} to compute the same by "
                    "operators whose bits do not depend on the other rows, got something else; backend='python' runs it"
                )
            logits = run_probe_steps(self)
            probe.require(logits)
        if self.fused is not None:
            from quire.model.fused import match_decoder

            self.decoder = match_decoder(model, self.fused)
            if self.decoder is not None and not torch.equal(run_probe_steps(self), logits):
                self.decoder = None
        return modules

    def _threads(self) -> AbstractContextManager[None]:
        """torch on one thread beside the kernels' pool."""
        return one_torch_thread() if self.device.is_native else nullcontext()

    @contextmanager
    def _switched(self, name: str = attention_function.NAME) -> Iterator[None]:
        """Attention `name` in all of the model's configs, for the time of a forward."""
        self._switched_from = [config.__dict__.get(_IMPLEMENTATION) for config in self._configs]
        try:
            for config in self._configs:
                config.__dict__[_IMPLEMENTATION] = name
            yield
        finally:
            self._switch_back()

    def _switch_back(self) -> None:
        before, self._switched_from = self._switched_from, None
        for config, value in zip(self._configs, before or (), strict=before is not None):
            config.__dict__[_IMPLEMENTATION] = value


_prepared: weakref.WeakSet[PreparedModel] = weakref.WeakSet()


def _switch_back_in_child() -> None:
    """A forward that was under way in another thread when a child was forked never ends there."""
    for prepared in list(_prepared):
        prepared._switch_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_switch_back_in_child)


def _eval(model: PreTrainedModel) -> Callable[[], None]:
    """Have all modules in eval mode; returns what gives each its own back, unless somebody has chosen meanwhile."""
    training = [module for module in model.modules() if module.training]
    own = below(model, "train")

    def train(mode: bool = True) -> Any:
        training.clear()
        return own(mode)

    for module in training:
        module.training = False
    uninstall = install(model, train=train)

    def undo() -> None:
        uninstall()
        while training:
            training.pop().training = True

    return undo


def _pack_linears(
    loaded: LoadedModel, folder: SavedFolder | None
) -> tuple[Callable[[], None], SavedWeights | None]:
    """`pack_linears`, with the packed form taken from `folder` or kept there where that can be done.

    Returns what undoes it, and the kept weights if there may be some.
    """
    mapped = loaded.mapped
    if mapped is None:
        return pack_linears(loaded.model), None
    if folder is None or choose_packing(loaded.dtype) != "native":
        return pack_linears(loaded.model, release=mapped.release), None
    with SavedLinears(folder, mapped, weights_to_pack(loaded.model)) as kept:
        undo = pack_linears(loaded.model, release=mapped.release, pack=kept.pack)
    return undo, kept


def _attention_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every config object an attention module of the model may look its implementation up in."""
    configs = {
        id(config): config
        for module in model.modules()
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig)
    }
    return list(configs.values())


def _forward_parameters(loaded: LoadedModel, needs: frozenset[str]) -> tuple[frozenset[str], str]:
    """What the model's forward takes, `needs` among it, and what it calls the cache."""
    parameters = frozenset(inspect.signature(loaded.model.forward).parameters)
    keyword = cache_keyword(loaded.model.forward)
    missing = sorted(needs - parameters) + ([] if keyword else ["cache"])
    if missing or keyword is None:
        raise UnsupportedModelError(
            f"model type {loaded.model_type}: expected a forward that takes {', '.join(sorted(needs))} and a cache, "
            f"{why_not_called(loaded.model, missing, parameters)}; such models come in a later version"
        )
    return parameters, keyword


def resolve_length(loaded: LoadedModel | UnloadedModel, asked: int | None) -> int:
    """The longest sequence to prepare for; checks what was asked for against what the model can."""
    most = loaded.max_model_len
    unswitched = rope.original_length(loaded.model)
    if asked is None:
        return most if unswitched is None else min(most, unswitched)
    most = max(most, longest_of(loaded.model.config) or 0)
    switches_by_length = any("dynamic" in kind for kind in rope.kinds(loaded.model))
    if asked < 1 or (asked > most and not switches_by_length):
        raise ArgumentError(f"expected max_model_len of 1 to {most} tokens for this model, got {asked}")
    return asked
