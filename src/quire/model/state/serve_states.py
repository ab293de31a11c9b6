"""The state layers of a loaded model made to serve an engine: found, held against the config, proved, installed.

Cost: `prove_states`, of each kind of mixer a copy in float32 and a few forwards of it; nothing of it where an earlier
proof of this very model is kept (`quire.model.saved_proof`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire import recurrence
from quire.attention import Device
from quire.errors import UnsupportedModelError
from quire.model.load import LoadedModel
from quire.model.state.adapter import StateAdapter
from quire.model.state.install import install_states
from quire.model.state.mixer_registry import state_adapters
from quire.model.state.state_proof import prove_states
from quire.spec import KVSpec

__all__ = ["find_states", "serve_states"]


def find_states(loaded: LoadedModel, spec: KVSpec, backend: Device) -> dict[int, StateAdapter]:
    """What can serve for each state layer, by layer.

    *raises:* UnsupportedModelError: mixers that are not known, or not the config's; or a device whose memory the
    recurrences cannot reach.
    """
    what = f"model type {loaded.model_type}"
    if not backend.is_host:
        raise UnsupportedModelError(
            f"{what}: expected a back end of this machine's memory for state layers, got {backend.name!r}; use "
            "backend='native' or 'python'"
        )
    adapters = state_adapters(loaded.model, recurrence.backend("native" if backend.is_native else "python"))
    expected = {state.layer: {field.name: field.shape for field in state.fields} for state in spec.states}
    found = {
        layer: {name: tuple(shape) for name, shape in one.fields.items()} for layer, one in adapters.items()
    }
    if found != expected:
        layer = next(
            layer for layer in sorted({*found, *expected}) if found.get(layer) != expected.get(layer)
        )
        raise UnsupportedModelError(
            f"{what}: expected a mixer in layer {layer} that keeps {expected.get(layer, 'nothing')}, as its config "
            f"says, got {found.get(layer, 'none that is known')}"
        )
    return adapters


def serve_states(
    loaded: LoadedModel, adapters: Mapping[int, StateAdapter], *, are_proved: bool
) -> Callable[[], None]:
    """Have every state layer run over the engine's rows; returns the undoing.

    are_proved: whether a kept proof of this very model says that they compute what its mixers do.

    *raises:* UnsupportedModelError: mixers that compute something else. The model is as it was then.
    """
    if not are_proved:
        try:
            prove_states(adapters)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"model type {loaded.model_type}: {error}") from error
    return install_states(adapters)
