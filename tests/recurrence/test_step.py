"""Arguments that a step and a call refuse, with one error and no change; and the registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recurrence_case import KINDS, make_case

from quire import backends
from quire.backends import native_module
from quire.errors import ArgumentError, BackendError
from quire.recurrence import backend, recurrence_step, reference_recurrence, register
from quire.recurrence.recurrence_backend import unregister
from quire.step import RecurrenceStep

BACKENDS = ["python", *(["native"] if hasattr(native_module(), "RecurrenceStep") else [])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], []), "at least one sequence"),
        (([0, 1, 2], [3]), "one start more than slots, got 3 starts and 1 slots"),
        (([0, 2, 2], [0, 1]), "rise from 0"),
        (([1, 2], [0]), "rise from 0"),
        (([0, 1, 2], [4, 4]), "all distinct"),
        (([0, 1], [-1]), r"slots of 0 to 2\^63 - 1"),
        (([0, 1], [2**63]), r"slots of 0 to 2\^63 - 1"),
        (([0, 2**63], [0]), "rise from 0"),
        (([0, 3], [0], [(3, 1)]), "checkpoints at rows of 0 to 2"),
        (([0, 3], [0], [(-1, 1)]), "checkpoints at rows of 0 to 2"),
        (([0, 3], [0], [(1, 0)]), "all distinct"),
        (([0, 3], [0], [(1, 2), (2, 2)]), "all distinct"),
        (([0, 3], [0], [(1,)]), "pairs"),
        (([0, 3.0], [0]), "starts as a list of whole numbers"),
        ((3, [0]), "starts as a list of whole numbers"),
    ],
)
def test_a_step_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        recurrence_step(*arguments)


def test_a_step_takes_lists_and_tensors() -> None:
    step = recurrence_step(torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([7, 1]), [(2, 4), (0, 3)])
    assert (step.starts, step.slots, step.checkpoints) == ((0, 2, 3), (7, 1), ((0, 3), (2, 4)))
    assert (step.num_rows, step.num_sequences) == (3, 2)


def spoiled(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [
        tensor[..., :0],
        torch.cat([tensor, tensor]),
        tensor[None],
        tensor.double(),
        tensor.to(torch.int32),
        tensor.to("meta"),
    ]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_refuses_what_does_not_fit_and_changes_nothing(kind: str, name: str) -> None:
    compute, step = backend(name), recurrence_step([0, 2, 5], [3, 1], [(4, 0)])
    case = make_case(kind, 5, torch.bfloat16, 50)

    def refuse(state: torch.Tensor, step: RecurrenceStep = step) -> None:
        before = state.clone() if state.device.type == "cpu" else None
        with pytest.raises(ArgumentError, match=r"expected .*, got "):
            case.run(compute, state, step)
        assert before is None or torch.equal(state, before)

    for at in [*case.rows, *(key for key, value in case.layer.items() if value is not None)]:
        inputs = case.rows if at in case.rows else case.layer
        good = inputs[at]
        for wrong in spoiled(good):
            inputs[at] = wrong
            if wrong.shape[:1] == good.shape[:1] or at not in case.rows:
                refuse(case.state)
        inputs[at] = good
    for wrong in spoiled(case.state):
        if wrong.dim() != case.state.dim() or wrong.shape[0] == case.state.shape[0]:
            refuse(wrong)
    refuse(case.state[:1].expand_as(case.state))
    if case.state.shape[1:-1].numel() > 1:
        refuse(torch.cat([case.state, case.state], dim=-1)[..., : case.state.shape[-1]])
    refuse(case.state[:3])  # a slot that is not there
    refuse(case.state, recurrence_step([0, 2, 4], [3, 1]))  # other rows than there are
    result = case.run(compute, case.state.clone(), step)
    for out in (result[:4], result.float(), result[None], torch.cat([result, result], dim=-1)[..., ::2]):
        case.options["out"] = out
        refuse(case.state)
    del case.options["out"]
    case.run(compute, case.state, step)  # as it is, it fits


def test_python_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend("python") is reference_recurrence.BACKEND
    monkeypatch.setenv("QUIRE_BACKEND", "python")
    assert backend() is reference_recurrence.BACKEND


def test_without_the_extension_python_is_taken_and_native_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_BACKEND", raising=False)
    monkeypatch.setattr(backends, "native_module", lambda: None)
    assert backend() is reference_recurrence.BACKEND
    with pytest.raises(BackendError, match="not built here"):
        backend("native")


def test_another_back_end_is_found_by_its_name() -> None:
    register("mine", reference_recurrence.ReferenceRecurrence)
    try:
        assert isinstance(backend("mine"), reference_recurrence.ReferenceRecurrence)
    finally:
        unregister("mine")
    with pytest.raises(ArgumentError, match="a backend of recurrences"):
        backend("mine")
