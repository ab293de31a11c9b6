"""The state layers of a loaded model prepared for an engine: found, compared with the config, proved, installed.

Cost: `prove_states`, for each kind of mixer a copy in float32 and a few forwards of it; nothing if the proof of this
same model is saved (`quire.model.prove.saved_proof`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.devices import Device
from quire.errors import UnsupportedModelError
from quire.model.prove.state_proof import prove_states
from quire.model.state.adapter import StateAdapter
from quire.model.state.install import install_states
from quire.model.state.mixer_registry import state_adapters
from quire.spec import KVSpec
from quire.weights.load import LoadedModel

__all__ = ["find_states", "serve_states"]


def find_states(loaded: LoadedModel, spec: KVSpec, device: Device) -> dict[int, StateAdapter]:
    """The adapters of all state layers, by layer.

    *raises:* UnsupportedModelError: unknown mixers, or mixers that differ from the config.
    """
    subject = f"model type {loaded.model_type}"
    adapters = state_adapters(loaded.model, device.recurrence)
    expected = {state.layer: {field.name: field.shape for field in state.fields} for state in spec.states}
    adapter_fields = {
        layer: {name: tuple(shape) for name, shape in adapter.fields.items()}
        for layer, adapter in adapters.items()
    }
    if adapter_fields != expected:
        layer = next(
            layer
            for layer in sorted({*adapter_fields, *expected})
            if adapter_fields.get(layer) != expected.get(layer)
        )
        raise UnsupportedModelError(
            f"{subject}: expected a mixer in layer {layer} with states {expected.get(layer, 'nothing')}, by its "
            f"config, got {adapter_fields.get(layer, 'no known mixer')}"
        )
    return adapters


def serve_states(
    loaded: LoadedModel, adapters: Mapping[int, StateAdapter], *, are_proved: bool
) -> Callable[[], None]:
    """Have every state layer run over the engine's rows; returns a function that undoes it.

    are_proved: whether a saved proof of this same model covers its mixers.

    *raises:* UnsupportedModelError: a mixer computes something else; the model is unchanged.
    """
    if not are_proved:
        try:
            prove_states(adapters)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"model type {loaded.model_type}: {error}") from error
    return install_states(adapters)
