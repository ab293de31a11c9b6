"""A model that this process has proved is not proved again: most of what opening a tiny model costs is its proof.

`proved_once`, a fixture of every test in whose conftest.py it is named, keeps what the proof of a model has found
(`PreparedModel._prove`) in memory, as `quire.model.kept_proof` keeps it in a file, and has it taken under exactly the
same key: every class and forward, hooks, attributes, configs, the bytes of every parameter and buffer, the longest
sequence and the back end. Everything else, the packing of weights too, is done anew each time.
Not for tests of the proof itself (`tests/model`), and tests marked `ci` prove every time.

Invariants
    1  what has a hook or a forward of its own, or is not a plain `PreparedModel`, is proved every time
    2  a refusal is never kept, nor findings that cannot be written down, nor the proof of a model that its own
       forwards change
    3  the first proof of a key is the real one, in every process

Cost: a hash of the parameters, under a millisecond for a tiny model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from transformers import PreTrainedModel

from quire.backends import native_module
from quire.model import PreparedModel
from quire.model.held_weight import HeldParameter, bytes_of
from quire.model.overlay import own_class
from quire.model.prove.hooks import hooked
from quire.model.prove.stamp import behaviour, facts

__all__ = ["ProvedOnce", "proved_once"]

_MOST_HASHED = 4 << 20  # bytes of parameters

_prove: Callable[[PreparedModel, PreTrainedModel], None] = PreparedModel._prove
_change: Callable[[PreparedModel, PreTrainedModel, Path | None], None] = PreparedModel._change


class ProvedOnce:
    """The findings of one model, in `_found` under `key`. What `PreparedModel` asks of a `KeptProof`."""

    _found: dict[Hashable, Any] = {}  # noqa: RUF012, of all models of this process

    def __init__(self, key: Hashable) -> None:
        self._key = key
        self.found: Any = self._found.get(key)

    def keep(self, found: Any) -> None:
        self._found[self._key] = found

    def forget(self) -> None:
        self._found.pop(self._key, None)


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


def _change_of_known(self: PreparedModel, model: PreTrainedModel, packed_weights: Path | None) -> None:
    key = _key_of(self, model) if packed_weights is None else None
    known: Any = None if key is None else ProvedOnce(key)
    self._proof = known
    _change(self, model, packed_weights)


def _prove_unknown(self: PreparedModel, model: PreTrainedModel) -> None:
    proof: Any = self._proof
    if not isinstance(proof, ProvedOnce):
        _prove(self, model)
    elif self.backend.is_native:
        known = proof.found is not None
        before = None if known else facts(model)
        _prove(self, model)  # takes what is kept, or keeps
        if not known and facts(model) != before:
            proof.forget()
    elif proof.found is None:
        before = facts(model)
        _prove(self, model)
        if facts(model) == before:
            proof.keep({})  # torch's own operators serve: there is nothing to install


def _key_of(prepared: PreparedModel, model: PreTrainedModel) -> Hashable | None:
    if type(prepared) is not PreparedModel or hooked(model) is not None:
        return None
    if any("forward" in module.__dict__ for module in model.modules()):
        return None
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if any(isinstance(tensor, HeldParameter) or tensor.device.type != "cpu" for _, tensor in tensors):
        return None
    if sum(tensor.numel() * tensor.element_size() for _, tensor in tensors) > _MOST_HASHED:
        return None
    digest = xxhash.xxh3_128()
    for _, tensor in tensors:
        digest.update(bytes_of(tensor))
    native = native_module()
    classes = tuple((own_class(module), type(module).forward) for module in model.modules())
    return (
        classes,
        behaviour(model),
        model.config.to_json_string(use_diff=False),
        repr(prepared.spec),
        tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors),
        digest.digest(),
        prepared.loaded.dtype,
        prepared.max_model_len,
        prepared.backend,
        None if native is None else native.isa(),
    )
