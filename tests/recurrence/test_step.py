"""Arguments that a step and a call refuse, with one error and no change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recurrence_case import KINDS, make_case

from quire.backends import native_module
from quire.devices import device_of
from quire.errors import ArgumentError
from quire.recurrence import Recurrence, recurrence_step, recurrences, reference_recurrence
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
    kernels, step = device_of(name).recurrence, recurrence_step([0, 2, 5], [3, 1], [(4, 0)])
    case = make_case(kind, 5, torch.bfloat16, 50)

    def refuse(state: torch.Tensor, step: RecurrenceStep = step) -> None:
        before = state.clone() if state.device.type == "cpu" else None
        with pytest.raises(ArgumentError, match=r"expected .*, got "):
            case.run(kernels, state, step)
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
    result = case.run(kernels, case.state.clone(), step)
    for out in (result[:4], result.float(), result[None], torch.cat([result, result], dim=-1)[..., ::2]):
        case.out = out
        refuse(case.state)
    case.out = None
    case.run(kernels, case.state, step)  # as it is, it fits


def test_each_recurrence_has_a_definition_and_a_kernel() -> None:
    kinds = {getattr(recurrences, name) for name in recurrences.__all__} - {Recurrence}
    assert set(reference_recurrence.DEFINITIONS) == kinds
    assert {make_case(kind, 3, torch.float32, 0).kind for kind in KINDS} == kinds
    if "native" in BACKENDS:
        from quire.devices.cpu import native_recurrence

        assert set(native_recurrence.KERNELS) == kinds
