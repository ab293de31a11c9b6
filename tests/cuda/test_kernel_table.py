"""Kernels compiled ahead of time: the resource table holds for a pairwise matrix, and the judge finds each fault."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (quire-kv[cuda])"
)

ROOT = Path(__file__).parent.parent.parent
HARNESS = Path(__file__).parent / "harness_kernels.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """In a child: triton reads TRITON_INTERPRET once a process, and the compiler needs it unset."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "scripts" / "gpu-kernels"), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


def of_harness(*functions: str) -> list[str]:
    return ["--kernels", *(f"{HARNESS}:{function}" for function in functions)]


@pytest.mark.ci
def test_the_table_holds_for_a_pairwise_matrix() -> None:
    """scripts/check-long compiles the whole one."""
    result = run("--pairwise")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_changed_number_and_a_missing_or_superfluous_row_are_differences(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    arguments = (*of_harness("variants"), "--table", table)
    written = run(*arguments, "--write")
    assert written.returncode == 0, written.stdout + written.stderr
    again = run(*arguments, "--pairwise")
    assert (again.returncode, again.stdout.strip()[-8:]) == (0, "0 faults"), again.stdout
    lines = table.read_text().splitlines()
    row = next(index for index, line in enumerate(lines) if line.startswith("product_"))
    numbers = lines[row].split(",")
    gone = lines.pop(row + 1).split(",")
    lines[row] = ",".join([*numbers[:2], str(int(numbers[2]) + 1), *numbers[3:]])
    lines.append(",".join(["departed", *numbers[1:]]))
    table.write_text("\n".join(lines) + "\n")
    changed = run(*arguments, "--pairwise")
    assert changed.returncode == 1
    for told in (
        f"{numbers[0]} {numbers[1]}: registers {int(numbers[2]) + 1} -> {numbers[2]}",
        f"{gone[0]} {gone[1]}: no row in the table",
        f"departed {numbers[1]}: only in the table",
    ):
        assert told in changed.stdout.splitlines()
    table.write_text("\n".join(["# triton 0.1", *lines[1:]]) + "\n")
    assert "judged by the rules alone" in run(*arguments, "--pairwise").stdout


def test_each_broken_rule_is_a_fault(tmp_path: Path) -> None:
    functions = ("spilling", "large", "without_promises", "broken")
    result = run(*of_harness(*functions), "--table", tmp_path / "table.csv")
    assert result.returncode == 1
    for told in (
        r"spilling sm_90: expected no spills, got ",
        r"large sm_80: expected at most 166912 bytes of shared memory, got 262144",
        r"single_loads sm_90: expected the promised vector_load instruction, got none in the code",
        r"ieee_product sm_90: expected the promised tensor_core instruction, got none in the code",
        r"broken sm_90: CompilationError: ",
    ):
        assert told in result.stdout


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (
            "specialized",
            "specialized: argument out: expected it in `divisible` or in the kernel's do_not_specialize",
        ),
        ("twice", "scale_bf16_2048: expected a name of one variant"),
        (
            "unknown_names",
            "expected promises of ['tensor_core', 'wgmma', 'async_copy', 'vector_load'], got ['speed']",
        ),
        (
            "unknown_names",
            "expected the parameters ['x', 'out', 'num_rows', 'BLOCK'], got ['x', 'out', 'BLOCK']",
        ),
    ],
)
def test_a_wrong_declaration_is_a_fault(function: str, told: str) -> None:
    result = run(*of_harness(function))
    assert result.returncode == 1
    assert told in result.stdout


def test_pairwise_has_each_pair_once(tmp_path: Path) -> None:
    """Of kernel, type, head and target; with fewer compilations than the whole matrix."""
    everything = run(*of_harness("variants"), "--list").stdout.split("\n")[:-1]
    chosen = run(*of_harness("variants"), "--list", "--pairwise").stdout.split("\n")[:-1]
    assert set(chosen) < set(everything)

    def pairs(lines: list[str]) -> set[tuple[str, str]]:
        found = set[tuple[str, str]]()
        for line in lines:
            name, target = line.split()
            kernel, dtype, block = name.split("_")
            values = (kernel, dtype, block, target)
            found |= {(a, b) for at, a in enumerate(values) for b in values[at + 1 :]}
        return found

    assert pairs(chosen) == pairs(everything)
