"""A loaded model, made ready to run on the paged cache, and given back as it was.

Preparation holds rotary embeddings still (`rope`), packs the linear layers (`linear`) and the experts of a mixture
(`experts`), and proves by a probe that the model so prepared answers as it did before (`probe`). The native back end
also has every operator made a function of its row alone (`row_invariant`), which takes a second probe where something
had to be replaced. The attention function is switched in only while `forward`
runs, so between steps the model is an ordinary one.
Not an engine: it computes one step for somebody who has allotted the slots.

Invariants
    R1  after `restore()` the model is as it came: same modules, same attention implementation, same buffers.
    R2  every answer comes from a model the probe has passed, now or, with packed weights kept, in an earlier start with
        everything the same (`kept_proof`).

Cost: `forward` is the model's own forward plus a few microseconds; preparation is one pass over the modules and the
probe's eleven small forwards, or none of them where a proof was kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quire.attention import AttentionBackend, reference
from quire.attention import backend as attention_backend
from quire.errors import ArgumentError, UnsupportedModelError
from quire.memory.storage import Storage
from quire.model import attention_function, rope, row_invariant
from quire.model.experts import pack_experts
from quire.model.holding import hold, let_go
from quire.model.huge_pages import HugePageMove
from quire.model.kept_proof import KeptProof
from quire.model.linear import choose_packing, pack_linears, weights_to_pack
from quire.model.load import LoadedModel
from quire.model.packed_weights import KeptWeights
from quire.model.paged_cache import PagedCache
from quire.model.probe import probe, rehearse
from quire.model.step import ForwardStep
from quire.model.watch import Record, watch_attention, watch_linears
from quire.torch_threads import one_torch_thread

if TYPE_CHECKING:
    from quire.model.fused import Fused, FusedDecoder

__all__ = ["PreparedModel"]

_IMPLEMENTATION = "_attn_implementation_internal"  # where transformers' configs keep the attention's name


class PreparedModel:
    """The model of `loaded`, ready for `forward`.

    Args:
        loaded: what `quire.model.load` gave.
        backend: of the attention: "python", "native" or None for the best there is.
        max_model_len: longest sequence that will be run. Not given: the model's own, or, for rotary embeddings that
            switch with the length (longrope, dynamic), the length up to which they do not. A longer one holds the long
            frequencies for all sequences.
        packed_weights: a folder that keeps the packed form of weights (`packed_weights`), and what the proof of a model
            found (`kept_proof`).

    Raises:
        ArgumentError: another one has prepared this very model and was not given back (`holding`).
        UnsupportedModelError: the model cannot be run exactly, with its type and the reason; it is left as it was.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        backend: str | None = None,
        max_model_len: int | None = None,
        packed_weights: Path | None = None,
    ) -> None:
        self.loaded = loaded
        self.spec = loaded.spec
        self.vocab_size = loaded.vocab_size
        self.max_model_len = _resolve_length(loaded, max_model_len)
        self.attention: AttentionBackend = attention_backend(backend)
        self._model: PreTrainedModel = loaded.model
        self._cache: PagedCache | None = None
        self._watch: row_invariant.Watch | None = None
        self._proof: KeptProof | None = None
        self._kept_pages: np.ndarray | None = None  # the file that packed weights are mapped from
        self._undo: list[Callable[[], None]] = []
        self.fused: Fused | None = None
        self.decoder: FusedDecoder | None = None
        self._parameters = _forward_parameters(loaded)
        self._configs = _attention_configs(loaded.model)
        attention_function.register()
        hold(loaded.model, self, self._undo)
        try:
            with self._threads():
                self._change(loaded.model, packed_weights)
                self._prove(loaded.model)
        except BaseException:
            self.restore()
            raise

    def attach(self, storage: Storage | None) -> None:
        """Run on `storage` from now on; its spec must be this model's. None lets go of it."""
        if self._cache is not None:
            self._cache.close()
        if storage is None:
            self._cache = None
            return
        if storage.spec.layers != self.spec.layers:
            raise ArgumentError("expected a storage built from this model's spec, got one of another spec")
        self._cache = PagedCache(self.spec, storage, self.attention, self.loaded.model_type)

    @property
    def num_attended(self) -> int:
        """Attention calls that read pages in the last forward."""
        return 0 if self._cache is None else self._cache.num_attended

    def forward(self, step: ForwardStep) -> torch.Tensor:
        """Compute a step: K and V of its tokens are in their slots afterwards.

        Returns:
            [R, vocab_size] in the model's dtype, the next-token logits of `step.logits_rows`.
        """
        cache = self._cache
        if cache is None:
            raise ArgumentError("expected a storage, got none; call PreparedModel.attach first")
        cache.begin(step)
        try:
            if self.decoder is not None and (logits := self.decoder(step, cache)) is not None:
                return logits
            if self.fused is not None:
                self.fused.active = True
            with (
                torch.inference_mode(),
                self._switched(),
                self._threads(),
                self._watch or nullcontext(),
            ):
                return self._own_forward(step, cache)
        finally:
            cache.end()
            if self.fused is not None:
                self.fused.active = False

    def _own_forward(self, step: ForwardStep, cache: PagedCache) -> torch.Tensor:
        """The logits of a step by the model's own forward."""
        keeps = "logits_to_keep" in self._parameters
        arguments: dict[str, Any] = {"logits_to_keep": step.logits_rows} if keeps else {}
        output = self._model(
            input_ids=step.input_ids[None],
            position_ids=step.position_ids[None],
            past_key_values=cache,
            use_cache=True,
            **arguments,
        )
        return output.logits[0] if keeps else output.logits[0][step.logits_rows]

    def plain_forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The model's own answer for one sequence int64 [T]: its cache, its eager attention. float32 [T, vocab_size].

        The probe's yardstick: linear layers and rotary embeddings are the prepared ones.
        """
        from transformers import DynamicCache

        with torch.inference_mode(), self._switched("eager"), self._threads():
            output = self._model(
                input_ids=input_ids[None],
                position_ids=torch.arange(input_ids.numel())[None],
                past_key_values=DynamicCache(config=self._model.config),
                use_cache=True,
            )
        return output.logits[0].float()

    def watch(self, record: Record) -> None:
        """Have `record` told of linear layers and attention that torch computes, on the storage attached now."""
        if self._cache is None:
            raise ArgumentError("expected a storage, got none; call PreparedModel.attach first")
        self._cache.backend = watch_attention(self.attention, record)
        self._undo.append(watch_linears(self._model, record))

    def move_to_huge_pages(self, spare_bytes: int) -> HugePageMove | None:
        """Begin to move packed weights that are mapped from a file to memory of this process, in huge pages.

        Only where that leaves as much free: spare_bytes is what this process can still use and has no other use for.
        None where it is not begun. Not what the weights are, nor where: only how fast they are read.
        """
        pages, self._kept_pages = self._kept_pages, None
        if pages is None or 2 * pages.size > spare_bytes:
            return None
        return HugePageMove(pages)

    def restore(self) -> None:
        """Make the model what it was before. Done twice, nothing happens."""
        self._kept_pages = None
        self._cache = self.decoder = None
        while self._undo:
            self._undo.pop()()
        let_go(self._model, self)

    def _change(self, model: PreTrainedModel, packed_weights: Path | None) -> None:
        training = model.training
        model.eval()
        self._undo.append(lambda: model.train(training) and None)
        self._undo.append(rope.freeze(model, self.max_model_len))
        if self.attention is not reference or choose_packing(self.loaded.dtype) != "native":
            # The python back end leaves the extension's kernels alone where they are built.
            undo, kept = _pack_linears(self.loaded, packed_weights)
            self._undo.append(undo)
            if kept is not None:
                self._kept_pages = kept.pages
                if kept.holds_all and self.attention is not reference:
                    self._proof = KeptProof.of(kept.path, self.loaded, self.max_model_len)
        if self.attention is reference:
            return
        self._undo.append(pack_experts(model))
        if choose_packing(self.loaded.dtype) == "native":
            from quire.model.fused import fuse

            found = None if self._proof is None else self._proof.found
            self.fused = fuse(model, self.loaded.dtype, None if found is None else found["fused"])
            self._undo.append(self.fused.restore)

    def _prove(self, model: PreTrainedModel) -> None:
        """Probe, or take what an earlier probe found; keep what this one finds."""
        proof = self._proof
        if proof is None:
            self._probe(model)
        elif proof.found is None:
            replaced = self._probe(model)
            fused = None if self.fused is None else self.fused.found(model)
            if fused is not None:
                names = {module: name for name, module in model.named_modules()}
                proof.keep({
                    "fused": fused,
                    "replaced": [names[module] for module in replaced],
                    "decoder": self.decoder is not None,
                })  # fmt: skip
        else:
            if replaced := [model.get_submodule(name) for name in proof.found["replaced"]]:
                self._undo.append(row_invariant.replace(model, replaced))
            if proof.found["decoder"] and self.fused is not None:
                from quire.model.fused import match_decoder

                self.decoder = match_decoder(model, self.fused)

    def _probe(self, model: PreTrainedModel) -> list[torch.nn.Module]:
        """Probe; with the native back end, find and replace what is not row-invariant, and probe again.

        Returns the modules whose forward was replaced.
        """
        probe(self)
        if self.attention is reference:
            return []
        if self.fused is not None:
            self.fused.keep_proved()
        self._watch = row_invariant.Watch(model)
        try:
            logits = rehearse(self)
            modules = list(self._watch.modules)
        finally:
            self._watch = None
        if modules:
            self._undo.append(row_invariant.replace(model, modules))
            probe(self)
            logits = rehearse(self)
        if self.fused is not None:
            from quire.model.fused import match_decoder

            self.decoder = match_decoder(model, self.fused)
            if self.decoder is not None and not torch.equal(rehearse(self), logits):
                self.decoder = None
        return modules

    def _threads(self) -> AbstractContextManager[None]:
        """torch on one thread beside the kernels' pool."""
        return nullcontext() if self.attention is reference else one_torch_thread()

    @contextmanager
    def _switched(self, name: str = attention_function.NAME) -> Iterator[None]:
        """Attention `name` in all of the model's configs, for the time of a forward."""
        before = [config.__dict__.get(_IMPLEMENTATION) for config in self._configs]
        try:
            for config in self._configs:
                config.__dict__[_IMPLEMENTATION] = name
            yield
        finally:
            for config, value in zip(self._configs, before, strict=True):
                config.__dict__[_IMPLEMENTATION] = value


def _pack_linears(loaded: LoadedModel, folder: Path | None) -> tuple[Callable[[], None], KeptWeights | None]:
    """`pack_linears`, with the packed form taken from `folder` or kept there where that can be done.

    Returns what undoes it, and the kept weights if there may be some.
    """
    mapped = loaded.mapped
    if mapped is None:
        return pack_linears(loaded.model), None
    if folder is None or choose_packing(loaded.dtype) != "native":
        return pack_linears(loaded.model, release=mapped.release), None
    with KeptWeights(folder, mapped, weights_to_pack(loaded.model)) as kept:
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


def _forward_parameters(loaded: LoadedModel) -> frozenset[str]:
    parameters = frozenset(inspect.signature(loaded.model.forward).parameters)
    missing = {"input_ids", "position_ids", "past_key_values"} - parameters
    if missing:
        raise UnsupportedModelError(
            f"model type {loaded.model_type}: expected a forward that takes input_ids, position_ids and "
            f"past_key_values, {type(loaded.model).__name__} takes no {' and no '.join(sorted(missing))}; such models "
            "come in a later version"
        )
    return parameters


def _resolve_length(loaded: LoadedModel, asked: int | None) -> int:
    """The longest sequence to prepare for; checks what was asked for against what the model can."""
    most = loaded.max_model_len
    unswitched = rope.original_length(loaded.model)
    if asked is None:
        return most if unswitched is None else min(most, unswitched)
    switches_by_length = any("dynamic" in kind for kind in rope.kinds(loaded.model))
    if asked < 1 or (asked > most and not switches_by_length):
        raise ArgumentError(f"expected max_model_len of 1 to {most} tokens for this model, got {asked}")
    return asked
