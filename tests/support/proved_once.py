"""Proves a model once per process: the proof is most of the cost of opening a tiny model.

`proved_once` is a fixture of every test in whose conftest.py it is named. It keeps what the proof of a model has found
(`PreparedModel._prove`) in memory, as `quire.model.prove.saved_proof` keeps it in a file. It is taken under exactly
the same key: every class and forward, attributes, configs, the bytes of every parameter and buffer, the longest
sequence, the back end, and what of the model was packed (a weight that a graph still holds is not). Everything
else, the packing too, is done anew each time.
Not for tests of the proof itself (`tests/model`), and tests marked `ci` prove every time.

Invariants
    1  These are proved every time: a model with a hook or a forward of its own, a subclass of `PreparedModel`, and a
       back end that somebody has registered.
    2  Refusals are never kept, nor findings that cannot be serialised, nor the proof of a model that its own forwards
    change. 3  The first proof of a key is the real one, in every process.

Cost: a hash of the parameters, under a millisecond for a tiny model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import xxhash
from transformers import PreTrainedModel

from quire.backends import extension
from quire.model import PreparedModel
from quire.model.prove.model_record import behaviour, facts
from quire.modules.hooks import first_hook
from quire.modules.module_patch import original_class
from quire.saved_folder import SavedFolder
from quire.weights.packed_parameter import PackedParameter, bytes_of

__all__ = ["ProvedOnce", "proved_once"]

_MOST_HASHED = 4 << 20  # bytes of parameters

_prove: Callable[[PreparedModel, PreTrainedModel], None] = PreparedModel._prove
_change: Callable[[PreparedModel, PreTrainedModel, SavedFolder | None], None] = PreparedModel._change


class ProvedOnce:
    """The findings of one model, in `_found` under `key`. What `PreparedModel` asks of a `SavedProof`."""

    _found: dict[Hashable, Any] = {}  # noqa: RUF012, of all models of this process

    def __init__(self, key: Any) -> None:
        self.key = key
        self.findings: Any = self._found.get(key)

    def save(self, findings: Any) -> None:
        self._found[self.key] = findings

    def forget(self) -> None:
        self._found.pop(self.key, None)


@pytest.fixture(autouse=True)
def proved_once(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("ci"):
        yield
        return
    patch: Any = PreparedModel
    patch._change, patch._prove = _change_of_known, _prove_unknown
    try:
        yield
    finally:
        patch._change, patch._prove = _change, _prove


def _change_of_known(self: PreparedModel, model: PreTrainedModel, packed_weights: SavedFolder | None) -> None:
    content = _content_of(self, model) if packed_weights is None else None
    known: Any = None if content is None else ProvedOnce(content)  # says that adapters of states are proved
    self._proof = known
    _change(self, model, packed_weights)
    if known is not None and self._proof is known:
        self._proof = known = ProvedOnce((content, _packed_of(model)))


def _prove_unknown(self: PreparedModel, model: PreTrainedModel) -> None:
    proof: Any = self._proof
    if not isinstance(proof, ProvedOnce):
        _prove(self, model)
    elif proof.findings is None:
        before = facts(model)
        _prove(self, model)
        if not self.device.is_native:
            proof.save({})  # torch's own operators serve: there is nothing to install
        if facts(model) != before:
            proof.forget()
        elif self._adapters:
            content, _ = proof.key
            ProvedOnce(content).save({})
    elif self.device.is_native:
        _prove(self, model)  # takes what is kept


def _content_of(prepared: PreparedModel, model: PreTrainedModel) -> Hashable | None:
    if type(prepared) is not PreparedModel or prepared.device.name not in ("python", "native"):
        return None
    if first_hook(model) is not None:
        return None
    if any("forward" in module.__dict__ for module in model.modules()):
        return None
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if any(isinstance(tensor, PackedParameter) or tensor.device.type != "cpu" for _, tensor in tensors):
        return None
    if sum(tensor.numel() * tensor.element_size() for _, tensor in tensors) > _MOST_HASHED:
        return None
    digest = xxhash.xxh3_128()
    for _, tensor in tensors:
        digest.update(bytes_of(tensor))
    native = extension(prepared.device.name)
    classes = tuple((original_class(module), type(module).forward) for module in model.modules())
    return (
        classes,
        behaviour(model),
        model.config.to_json_string(use_diff=False),
        repr(prepared.spec),
        tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors),
        digest.digest(),
        prepared.loaded.dtype,
        prepared.max_model_len,
        prepared.device.name,
        None if native is None else native.isa(),
    )


def _packed_of(model: PreTrainedModel) -> Hashable:
    return tuple((type(module).__name__, type(module.__dict__.get("_packed"))) for module in model.modules())
