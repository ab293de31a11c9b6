"""The choice of a back end, and the error if it is not available."""

from __future__ import annotations

import pytest

from quire import backends
from quire.devices import device_of, reference_device
from quire.errors import ArgumentError, BackendError
from quire.recurrence import reference_recurrence


def test_python_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of("python") is reference_device.DEVICE
    assert device_of("python").recurrence is reference_recurrence.BACKEND
    monkeypatch.setenv("QUIRE_BACKEND", "python")
    assert device_of() is reference_device.DEVICE


def test_without_the_extension_python_is_taken_and_native_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_BACKEND", raising=False)
    monkeypatch.setattr(backends, "native_module", lambda: None)
    assert device_of() is reference_device.DEVICE
    with pytest.raises(BackendError, match=r"not built here; install with a C.*compiler"):
        device_of("native")
    monkeypatch.setenv("QUIRE_BACKEND", "native")
    with pytest.raises(BackendError, match='backend="python"'):
        device_of()
    assert device_of("python") is reference_device.DEVICE


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ArgumentError,
        match=r"a back end, one of \['native', 'python', 'torch', 'triton'\], got 'cuda' - in `backend`",
    ):
        device_of("cuda")
    monkeypatch.setenv("QUIRE_BACKEND", "fast")
    with pytest.raises(ArgumentError, match="QUIRE_BACKEND"):
        device_of()
