"""Prepares a loaded model to run on the paged cache, and restores it.

Preparation freezes rotary embeddings (`rope`), packs the linear layers (`linear`) and the experts of a mixture
(`experts`), and proves by a probe that the prepared model gives the same answers (`prove.model_probe`). For the native
back end every operator also becomes a function of its row alone (`row_invariant`), with a second probe if an operator
had to be replaced. The attention function is switched in only while `forward` runs, so the model is unchanged between
steps. It stands in the model's configs, which all threads see: callers that run the model in several threads take
`lock`. Not an engine: it computes one step, whose slots the caller has allotted.

Invariants
    R1  after `restore()` the model is as it came: same modules, same attention implementation, same buffers.
    R2  every answer comes from a model that passed the probe, now or, with saved packed weights, in an earlier start
        with everything the same (`saved_proof`).

Cost: `forward` is the model's own forward plus a few microseconds; preparation is one pass over the modules and the
probe's eleven small forwards, or none of them with a saved proof.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from quire.attention import AttentionOptions
from quire.devices import Device, device_of
from quire.errors import ArgumentError, LoadError, UnsupportedModelError
from quire.load_progress import observer
from quire.memory.block_bytes import BlockStorage
from quire.memory.heap import give_back_freed
from quire.memory.storage import Storage
from quire.model import attention_function, rope, row_invariant
from quire.model.attention_patch import AttentionPatch, has_position_biases, patch_attention
from quire.model.cache_keyword import cache_keyword
from quire.model.latent import install_latents
from quire.model.model_lock import lock_model, unlock_model
from quire.model.paged_cache import PagedCache, paged_cache_class
from quire.model.placement import move_model, require_on
from quire.model.prove.generated_tokens import check_generate
from quire.model.prove.latent_proof import prove_latents
from quire.model.prove.model_probe import Probe, run_probe_steps
from quire.model.prove.model_record import ModelRecord, facts
from quire.model.prove.replaced_operators import first_unproved, one_of_each_kind
from quire.model.prove.saved_proof import SavedProof
from quire.model.state import StateAdapter
from quire.model.state.serve_states import find_states, serve_states
from quire.model.torch_timing import RecordCall, time_attention, time_linears
from quire.model.unsupported import forward_mismatch, unsupported_feature
from quire.modules.hooks import hooks_on, may_be_replaced
from quire.modules.module_patch import current_method, patch_methods
from quire.process import ForkSafeLock
from quire.saved_folder import SavedFolder
from quire.spec.model_config import longest_of
from quire.step import ForwardStep
from quire.torch_threads import one_torch_thread
from quire.weights.experts import pack_experts
from quire.weights.huge_pages import HugePageMove
from quire.weights.linear import choose_packing, pack_linears, packing_on, weights_to_pack
from quire.weights.load import LoadedModel, UnloadedModel
from quire.weights.quantized_modules import quantized_weights
from quire.weights.saved_check import SavedChecks
from quire.weights.saved_linears import SavedLinears
from quire.weights.saved_weights import SavedWeights

if TYPE_CHECKING:
    from quire.model.fused import Fused, FusedDecoder

__all__ = ["PreparedModel", "resolve_length"]

_log = logging.getLogger("quire")

_IMPLEMENTATION = "_attn_implementation_internal"  # the attention's name in transformers' configs


class PreparedModel:
    """The model of `loaded`, ready for `forward`.

    Args:
        loaded: the result of `quire.weights.load`.
        backend: "python", "native", a registered name (`quire.devices.device`), or None for the best available file.
        max_model_len: longest sequence that will be run. Default: the model's own, or, for rotary embeddings that
            switch with the length (longrope, dynamic), the length up to which they do not. A longer one uses the long
            frequencies for all sequences.
        packed_weights: a folder that saves the packed form of weights (`saved_weights`) and the findings of the proof
            (`saved_proof`).

    Raises:
        ArgumentError: another holder has prepared this very model and not restored it (`model_lock`).
        UnsupportedModelError: the model cannot be run exactly, with its type and the reason; it is restored.
    """

    # Whether the model's own attention runs, a sequence at a time (`sequential_model`).
    by_own_forward = False
    needs = frozenset({"input_ids", "position_ids"})  # arguments of its forward, in addition to a cache

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
        self._requested_length = max_model_len
        self._cache: PagedCache | None = None
        self._record: RecordCall | None = None
        self.lock = ForkSafeLock()  # for callers that run the model in several threads
        self._prepare(loaded, packed_weights)

    def _prepare(self, loaded: LoadedModel, packed_weights: SavedFolder | None) -> None:
        self.loaded = loaded
        self.spec = loaded.spec
        # By layer, the offsets subtracted from keys that are stored as codes (`quire.model.key_offsets`).
        self.key_offsets: dict[int, torch.Tensor] = {}
        self.vocab_size = loaded.vocab_size
        self.max_model_len = resolve_length(loaded, self._requested_length)
        self.rotary_note = rope.note(loaded.model, self.max_model_len, loaded.max_model_len)
        self._model: PreTrainedModel = loaded.model
        self._recorder: row_invariant.Recorder | None = None
        self._proof: SavedProof | None = None
        self._saved_pages: list[np.ndarray] = []  # the mapped files of packed weights
        self.packed_check: SavedChecks | None = None
        self._use_saved(loaded.saved_weights)
        self._undo: list[Callable[[], None]] = []
        self._latents: dict[torch.nn.Module, Any] = {}  # of all caches; see `PagedCache.latents`
        self._adapters: Mapping[int, StateAdapter] = {}  # of state layers, by layer
        self.fused: Fused | None = None
        self.decoder: FusedDecoder | None = None
        self.attention_patch: AttentionPatch | None = None
        # States need no positions: only layers with attention do.
        self._attends = any(layer.attends for layer in loaded.spec.layers)
        no_positions = not self._attends or has_position_biases(loaded.model)
        needs = self.needs - {"position_ids"} if no_positions else self.needs
        self._parameters, self._cache_keyword = self._read_forward(loaded, needs)
        self._configs = _attention_configs(loaded.model)
        self._switched_from: list[Any] | None = None  # the configs' own attention, while it is replaced
        _prepared.add(self)
        attention_function.register()
        lock_model(loaded.model, self, self._undo)
        try:
            if not self.device.is_host:
                self._move(loaded)
            require_on(loaded.model, self.device.torch_device)
            with self._threads(), torch.autocast(self.device.torch_device.type, enabled=False):
                self._give_back_training = _eval(loaded.model)
                self._undo.append(self._give_back_training)
                observer().begin_phase("packing weights")
                self._change(loaded.model, packed_weights)
                if self._attends and (self.attention_patch is None or not self.attention_patch.no_positions):
                    _forward_parameters(loaded, self.needs)
                before = facts(loaded.model)
                observer().begin_phase("proving the model")
                self._prove(loaded.model)
                if not may_be_replaced(loaded.model) or hooks_on(loaded.model):
                    self.decoder = None  # it calls no module, and would skip hooks
            now = facts(loaded.model)
            volatile = frozenset(name for name in before if before[name] != now.get(name))
            self.model_record = ModelRecord(loaded.model, now, volatile)
            self._undo.append(self.model_record.release)
        except UnsupportedModelError as error:
            self.restore()
            missing = None if self.by_own_forward else unsupported_feature(loaded.model)
            if missing is None:
                raise
            raise UnsupportedModelError(
                f"model type {loaded.model_type}: {missing}; such models come in a later version"
            ) from error
        except BaseException:
            self.restore()
            raise

    def _move(self, loaded: LoadedModel) -> None:
        """Move the weights to the device. Only a caller's model is moved back in the end."""
        file_ranges = loaded.file_ranges
        observer().begin_phase("moving weights")
        release = None if file_ranges is None else file_ranges.release
        undo = move_model(loaded.model, self.device.torch_device, release)
        if file_ranges is None:
            self._undo.append(functools.partial(self._move_back, undo))

    def _move_back(self, undo: Callable[[], None]) -> None:
        try:
            undo()
        except RuntimeError:
            if not self.device.is_lost():
                raise
            _log.error(
                "%s: its weights are lost with the device %s; load it again",
                self.loaded.name,
                self.device.name,
            )

    @property
    def by_token(self) -> bool:
        """Whether a forward has one token, in prompts too (`sequential_model`, `recurrent_model`)."""
        return False

    def _read_forward(self, loaded: LoadedModel, needs: frozenset[str]) -> tuple[frozenset[str], str]:
        """The parameters of the model's forward, and its cache keyword.

        *raises:* UnsupportedModelError: it does not take `needs` and a cache.
        """
        return _forward_parameters(loaded, needs)

    def prepare_again(self, loaded: LoadedModel, storage: Storage) -> None:
        """Follow changes of the model: undo everything, prepare and prove the model in its present state, and run on
        `storage` again.

        *raises:* as the constructor; the model is then in its state without Quire, and this object cannot run.
        """
        self.restore()
        self._prepare(loaded, None)
        self.attach(storage)
        if self._record is not None:
            self.time_calls(self._record)

    def give_back_training(self) -> None:
        """Restore the modules' modes, training or not, before `restore`, which does it otherwise."""
        self._give_back_training()

    def attach(
        self,
        storage: Storage | None,
        attended: dict[torch.nn.Module, tuple[int, AttentionOptions]] | None = None,
    ) -> None:
        """Run on `storage` from now on; its spec must be this model's. None detaches.

        attended: gets layer and settings of each module of the model that calls attention.
        """
        if self._cache is not None:
            self._cache.close()
        self._cache = None if storage is None else self.cache_over(storage)
        if self._cache is not None:
            self._cache.attended = attended

    def cache_over(self, storage: Storage) -> PagedCache:
        """A cache for `forward` on `storage`, whose spec must be this model's."""
        self.check_storage(storage)
        states = storage.states if isinstance(storage, BlockStorage) else None
        made = paged_cache_class(self.loaded.model)
        cache = made(storage.spec, storage, self.device, self.loaded.model_type, states)
        cache.latents, cache.key_offsets = self._latents, self.key_offsets
        return cache

    def check_storage(self, storage: Storage) -> None:
        """*raises:* ArgumentError: the storage has another spec than this model; its formats may differ."""
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
            cache: over the storage of the step; default: over the attached file.

        Returns:
            [R, vocab_size] in the model's dtype, the next-token logits of `step.logits_rows`, where the model computes.
            On another device than this machine the next forward may overwrite them.

        Raises:
            LoadError: saved packed weights were found to be damaged (`saved_check`).
        """
        if self.packed_check is not None and self.packed_check.damage is not None:
            raise LoadError(self.packed_check.damage)
        cache = self._cache if cache is None else cache
        if cache is None:
            raise ArgumentError("expected a storage, got none; call PreparedModel.attach first")
        if not self.device.is_host:
            return self.device.compute(step, functools.partial(self._forward, cache=cache), cache)
        return self._forward(step, cache)

    def _forward(self, step: ForwardStep, cache: PagedCache) -> torch.Tensor:
        cache.begin(step)
        try:
            if self.decoder is not None and (logits := self.decoder(step, cache)) is not None:
                return logits
            with (
                row_invariant.serving() if self.device.is_host else self.device.exact_operators(),
                nullcontext() if self.fused is None else self.fused.serving(),
                torch.inference_mode(),
                self._switched(),
                self._threads(),
                self._recorder or nullcontext(),
            ):
                return self._model_forward(step, cache)
        finally:
            cache.end()

    def _model_forward(self, step: ForwardStep, cache: PagedCache) -> torch.Tensor:
        """The logits of a step by the model's own forward."""
        selects_rows = "logits_to_keep" in self._parameters
        arguments: dict[str, Any] = {self._cache_keyword: cache}
        if selects_rows:
            arguments["logits_to_keep"] = step.logits_rows
        if self.attention_patch is not None and self.attention_patch.mask is not None:
            arguments["attention_mask"] = self.attention_patch.mask
        output = self._model(
            input_ids=step.input_ids[None],
            use_cache=True,
            **self._positions(step.position_ids[None]),
            **arguments,
        )
        return output.logits[0] if selects_rows else output.logits[0][step.logits_rows]

    @contextmanager
    def paged_attention(self) -> Iterator[None]:
        """Within it the model's modules attend to the pages of their cache."""
        with torch.inference_mode(), self._switched():
            yield

    @contextmanager
    def eager_attention(self) -> Iterator[None]:
        """Within it the model's forwards use its own eager attention, without gradients."""
        with torch.inference_mode(), self._switched("eager"):
            yield

    def model_logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, cache: Cache, *, eager: bool = False
    ) -> torch.Tensor:
        """The model's own logits for sequences int64 [n, T], or a single one [T]: [n, T, vocab_size].

        Linear layers and rotary embeddings are the prepared ones, no module is fused. The attention is the default of
        `generate` (sdpa for most models, which may differ from eager), or eager.
        """
        place = self.device.torch_device
        with self.eager_attention() if eager else torch.inference_mode():
            logits = self._model(
                input_ids=input_ids.reshape(-1, positions.numel()).to(place),
                use_cache=True,
                **self._positions(positions[None].to(place)),
                **{self._cache_keyword: cache},
            ).logits
        return logits.cpu()

    def _positions(self, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Empty for a forward without position_ids: biases on the scores encode the positions (`attention_patch`)."""
        return {"position_ids": position_ids} if "position_ids" in self._parameters else {}

    def time_calls(self, record: RecordCall) -> None:
        """Report linear layers and attention that torch computes to `record`, on the storage attached now."""
        if self._cache is None:
            raise ArgumentError("expected a storage, got none; call PreparedModel.attach first")
        self._cache.backend = time_attention(self.device, record)
        self._record = record
        self._undo.append(time_linears(self._model, record))

    def move_to_huge_pages(self, spare_bytes: int) -> HugePageMove | None:
        """Begin to move packed weights that are mapped from files to memory of this process, in huge pages, or return
        None.

        It begins only if that leaves as much memory free: spare_bytes is memory that this process can still use in
        addition to the files, and does not need. Values and addresses of the weights stay; reads become faster.
        """
        files, self._saved_pages = self._saved_pages, []
        if not files or sum(pages.size for pages in files) > spare_bytes:
            return None
        return HugePageMove(*files)

    def restore(self) -> None:
        """Return the model to its state before. A second call does nothing."""
        self._saved_pages = []
        self._cache = self.decoder = self.packed_check = None
        self._latents.clear()
        while self._undo:
            self._undo.pop()()
        unlock_model(self._model, self)

    def _change(self, model: PreTrainedModel, packed_weights: SavedFolder | None) -> None:
        if self.spec.has_indexer:
            layers = [layer.index_of for layer in self.spec.layers if layer.index_of is not None]
            raise UnsupportedModelError(
                f"model type {self.loaded.model_type}: expected layers that attend to all tokens or to a window, got "
                f"{len(layers)}, layer {layers[0]} first, that select tokens by an indexer (DSA)"
            )
        if self.spec.states:
            self._adapters = find_states(self.loaded, self.spec, self.device)
        self._undo.append(rope.freeze(model, self.max_model_len))
        packing = packing_on(self.device)
        if packing is not None:
            release = None if self.loaded.file_ranges is None else self.loaded.file_ranges.release
            self._undo.append(pack_linears(model, packing, release=release, pack=self.device.pack))
        else:
            undo, saved = _pack_linears(self.loaded, packed_weights)
            self._undo.append(undo)
            if saved is not None and packed_weights is not None:
                files = (*self.loaded.saved_weights, saved)
                self._use_saved(files)
                paths = [file.path for file in files if file.pages is not None]
                codes_are_saved = all(weight.is_saved for weight in quantized_weights(model).values())
                are_all_saved = codes_are_saved and all(file.holds_all for file in files)
                if self.device.is_native and are_all_saved and paths:
                    self._proof = SavedProof.for_model(packed_weights, paths, self.loaded, self.max_model_len)
        if self._adapters:
            are_proved = self._proof is not None and self._proof.findings is not None
            self._undo.append(serve_states(self.loaded, self._adapters, are_proved=are_proved))
        if self.device.is_native:
            self._undo.append(pack_experts(model))
        if (attention_patch := patch_attention(model)) is not None:
            self.attention_patch = attention_patch
            self._undo.append(attention_patch.undo)
        if any(layer.latent for layer in self.spec.layers):
            self._undo.append(install_latents(model, self.loaded.model_type))

    def _use_saved(self, saved: Sequence[SavedWeights]) -> None:
        """Register the files that weights are read from: their pages and checks."""
        self._saved_pages = [file.pages for file in saved if file.pages is not None]
        checks = [file.check for file in saved if file.check is not None]
        self.packed_check = SavedChecks(checks) if checks else None

    def _prove(self, model: PreTrainedModel) -> None:
        """Prove the prepared model, or apply the findings of an earlier proof; save new findings."""
        proof = self._proof
        if proof is not None and proof.findings is not None:
            self._apply_findings(model, proof.findings)
            return
        attended: dict[torch.nn.Module, tuple[int, AttentionOptions]] = {}
        run_probe_steps(self, attended)
        latents = {module: layer for module, (layer, _) in attended.items() if self.spec.layers[layer].latent}
        if latents:
            prove_latents(self, latents)
            attended = {module: call for module, call in attended.items() if module not in latents}
        if self.device.is_native and choose_packing(self.loaded.dtype) == "native":
            from quire.model.fused import fuse

            self.fused = fuse(self, attended, self._adapters)
            self._undo.append(self.fused.restore)
        give_back_freed()
        replaced = self._probe(model)
        fused = None if self.fused is None else self.fused.findings(model)
        if proof is not None and fused is not None:
            names = {module: name for name, module in model.named_modules()}
            proof.save({
                "fused": fused,
                "replaced": [names[module] for module in replaced],
                "decoder": self.decoder is not None,
            })  # fmt: skip

    def _apply_findings(self, model: PreTrainedModel, findings: dict[str, Any]) -> None:
        """Serve with the findings of an earlier proof of this very model."""
        from quire.model.fused import fuse_again, match_decoder

        self.fused = fuse_again(model, self.loaded.dtype, findings["fused"], self._adapters)
        self._undo.append(self.fused.restore)
        if replaced := [model.get_submodule(name) for name in findings["replaced"]]:
            self._undo.append(row_invariant.replace(model, replaced))
        if findings["decoder"]:
            self.decoder = match_decoder(model, self.fused)

    def _probe(self, model: PreTrainedModel) -> list[torch.nn.Module]:
        """Compare the logits of the prepared model; with the native back end, find and replace operators that are not
        row-invariant.

        Returns the modules whose forward was replaced.
        """
        probe = Probe(self, needs_float64=not self.spec.states)
        if not self.device.is_native:
            probe.require(run_probe_steps(self))
            check_generate(self.loaded, probe)
            return []
        self._recorder = row_invariant.Recorder(model)
        try:
            logits = run_probe_steps(self)
            modules = list(self._recorder.modules)
        finally:
            self._recorder = None
        probe.require(logits)
        check_generate(self.loaded, probe)
        if modules:
            module_forwards = {
                module: current_method(module, "forward") for module in one_of_each_kind(modules)
            }
            self._undo.append(row_invariant.replace(model, modules))
            if (module := first_unproved(self, module_forwards)) is not None:
                raise UnsupportedModelError(
                    f"model type {self.loaded.model_type}: expected {type(module).__name__} to compute the same with "
                    "operators whose bits do not depend on the other rows, got other results; backend='python' runs it"
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
        """torch on one thread, next to the kernels' pool."""
        return one_torch_thread() if self.device.is_native else nullcontext()

    @contextmanager
    def _switched(self, name: str = attention_function.NAME) -> Iterator[None]:
        """Attention `name` in all of the model's configs, during a forward."""
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
    """End forwards of other threads in a forked child, where those threads do not run."""
    for prepared in list(_prepared):
        prepared._switch_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_switch_back_in_child)


def _eval(model: PreTrainedModel) -> Callable[[], None]:
    """Have all modules in eval mode; returns a function that restores each module's mode, unless a caller has set it
    since."""
    training = [module for module in model.modules() if module.training]
    model_train = current_method(model, "train")

    def train(mode: bool = True) -> Any:
        training.clear()
        return model_train(mode)

    for module in training:
        module.training = False
    uninstall = patch_methods(model, train=train)

    def undo() -> None:
        uninstall()
        while training:
            training.pop().training = True

    return undo


def _pack_linears(
    loaded: LoadedModel, folder: SavedFolder | None
) -> tuple[Callable[[], None], SavedWeights | None]:
    """`pack_linears`, with packed weights read from `folder` or saved there if possible.

    Returns the undo, and the saved weights if there may be some.
    """
    file_ranges = loaded.file_ranges
    if file_ranges is None:
        return pack_linears(loaded.model), None
    if folder is None or choose_packing(loaded.dtype) != "native":
        return pack_linears(loaded.model, release=file_ranges.release), None
    with SavedLinears(folder, file_ranges, weights_to_pack(loaded.model)) as saved:
        undo = pack_linears(loaded.model, release=file_ranges.release, pack=saved.pack)
    return undo, saved


def _attention_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every config object in which an attention module of the model may look up its implementation."""
    configs = {
        id(config): config
        for module in model.modules()
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig)
    }
    return list(configs.values())


def _forward_parameters(loaded: LoadedModel, needs: frozenset[str]) -> tuple[frozenset[str], str]:
    """The parameters of the model's forward, which include `needs`, and its cache keyword."""
    parameters = frozenset(inspect.signature(loaded.model.forward).parameters)
    keyword = cache_keyword(loaded.model.forward)
    missing = sorted(needs - parameters) + ([] if keyword else ["cache"])
    if missing or keyword is None:
        raise UnsupportedModelError(
            f"model type {loaded.model_type}: expected a forward that takes {', '.join(sorted(needs))} and a cache, "
            f"{forward_mismatch(loaded.model, missing, parameters)}; such models come in a later version"
        )
    return parameters, keyword


def resolve_length(loaded: LoadedModel | UnloadedModel, requested: int | None) -> int:
    """The longest sequence to prepare for: `requested`, which must be possible for the model, or a default."""
    longest = loaded.max_model_len
    unswitched = rope.original_length(loaded.model)
    if requested is None:
        return longest if unswitched is None else min(longest, unswitched)
    longest = max(longest, longest_of(loaded.model.config) or 0)
    switches_by_length = any("dynamic" in kind for kind in rope.kinds(loaded.model))
    if requested < 1 or (requested > longest and not switches_by_length):
        raise ArgumentError(
            f"expected max_model_len of 1 to {longest} tokens for this model, got {requested}"
        )
    return requested
