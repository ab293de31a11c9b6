"""Quire's results on a GGUF file against llama.cpp's on the same file, for each architecture.

The files are written by llama.cpp's own converter, in float32. `scripts/llama-cpp` builds what QUIRE_LLAMA_CPP names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.llama_cpp_cases import CASES, NUM_WORDS, make
from transformers import PreTrainedModel

from quire.errors import LoadError
from quire.weights import load

pytestmark = pytest.mark.llamacpp

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="session")
def llama_cpp() -> Path:
    folder = os.environ.get("QUIRE_LLAMA_CPP")
    if not folder:
        pytest.skip("QUIRE_LLAMA_CPP names no folder with llama.cpp; scripts/llama-cpp DIR builds one")
    path = Path(folder).resolve()
    if not (path / "bin" / "python").exists() or not (path / "source").exists():
        pytest.skip(f"QUIRE_LLAMA_CPP: {path} has no llama.cpp; scripts/llama-cpp {path} builds it")
    return path


@pytest.fixture(scope="session")
def files(llama_cpp: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file of each case that is run."""
    folder = tmp_path_factory.mktemp("gguf")
    of_files = [item for item in request.session.items if "files" in getattr(item, "fixturenames", ())]
    names = sorted({item.callspec.params["name"] for item in of_files})
    source = llama_cpp / "source" / "vendor" / "llama.cpp"
    paths = {"PYTHONPATH": os.pathsep.join(map(str, [source / "gguf-py", source, SUPPORT.parent]))}
    program = [sys.executable, str(SUPPORT / "llama_cpp_convert.py"), str(folder), *names]
    done = subprocess.run(program, env={**os.environ, **paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def theirs(
    llama_cpp: Path, file: Path, prompts: dict[str, np.ndarray], folder: Path
) -> dict[str, np.ndarray]:
    np.savez(folder / "prompts.npz", **prompts)
    program = [str(llama_cpp / "bin" / "python"), str(SUPPORT / "llama_cpp_logits.py"), str(file)]
    places = [str(folder / "prompts.npz"), str(folder / "logits.npz")]
    done = subprocess.run([*program, *places], capture_output=True, text=True)
    assert done.returncode == 0, f"{file.name}: {done.stderr[-2000:]}"
    with np.load(folder / "logits.npz") as logits:
        return dict(logits)


def written(files: Path, name: str) -> Path:
    file = files / f"{name}.gguf"
    assert file.exists(), (files / f"{name}.error").read_text()
    return file


def of_model(model: PreTrainedModel, prompts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return {
            name: model(torch.from_numpy(tokens)[None]).logits[0].numpy() for name, tokens in prompts.items()
        }


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.refused])
def test_logits_are_those_of_llama_cpp(name: str, llama_cpp: Path, files: Path, tmp_path: Path) -> None:
    case, file = CASES[name], written(files, name)
    words = np.random.default_rng(0)
    prompts = {str(length): words.integers(3, NUM_WORDS, length) for length in case.lengths}
    ours = of_model(load(file, dtype="float32").model, prompts)
    expected = of_model(make(name), prompts) if case.apart else theirs(llama_cpp, file, prompts, tmp_path)
    for length, want in expected.items():
        error = np.abs(ours[length] - want).max()
        assert error < case.bound * want.std(), f"{length} tokens: {error / want.std():.1e} of the spread"
        best = np.sort(want, axis=-1)[:, -2:]
        is_sure = best[:, 1] - best[:, 0] > error
        assert is_sure.any()
        assert np.array_equal(ours[length].argmax(-1)[is_sure], want.argmax(-1)[is_sure]), length


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused])
def test_other_files_are_refused(name: str, files: Path) -> None:
    with pytest.raises(LoadError, match=CASES[name].refused):
        load(written(files, name))
