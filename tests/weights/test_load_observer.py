"""A load reports its phases in order to its observer, and bytes of weights up to the files' total."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support import gguf_case

from quire import LLM
from quire.backends import native_module
from quire.load_progress import progress_to

EMBEDDED = Path(__file__).parents[2] / "src/quire/weights/embedded"
PHASES = ["reading weights", "packing weights", "proving the model"]


class Recorder:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.num_bytes = self.num_read = 0

    def begin_phase(self, phase: str, num_bytes: int = 0) -> None:
        self.phases.append(phase)
        self.num_bytes = num_bytes or self.num_bytes

    def add_read(self, num_bytes: int) -> None:
        self.num_read += num_bytes


def watched(model: Path, **options: str) -> Recorder:
    watch = Recorder()
    with progress_to(watch), LLM(model, kv_memory="16MiB", **options):
        return watch


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_case.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", gguf_case.tiny())


def test_a_folder_is_read_as_it_is_packed() -> None:
    watch = watched(EMBEDDED)
    assert watch.phases == PHASES
    assert watch.num_bytes == (EMBEDDED / "model.safetensors").stat().st_size
    # Norms are not packed; without the extension the embedding, a fifth of this model, is not either.
    packed = 0.9 if native_module() is not None else 0.75
    assert packed * watch.num_bytes < watch.num_read <= watch.num_bytes


def test_weights_are_rounded_in_a_phase_of_its_own() -> None:
    watch = watched(EMBEDDED, weights="int8")
    assert watch.phases == ["reading weights", "rounding weights", *PHASES[1:]]
    assert 0.9 * watch.num_bytes < watch.num_read <= watch.num_bytes


@pytest.mark.parametrize("options", [{}, {"weights": "bf16"}])
def test_a_gguf_file_is_read_once(gguf: Path, options: dict[str, str]) -> None:
    watch = watched(gguf, **options)
    assert watch.phases == PHASES
    assert watch.num_bytes == gguf.stat().st_size
    assert 0 < watch.num_read <= watch.num_bytes


def test_another_thread_is_not_told_of() -> None:
    watch = Recorder()
    with progress_to(watch):
        thread = threading.Thread(target=lambda: LLM(EMBEDDED, kv_memory="16MiB").close())
        thread.start()
        thread.join()
    assert watch.phases == []


def test_nobody_is_told_afterwards_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_to(watch := Recorder()):
        pass
    with LLM(EMBEDDED, kv_memory="16MiB"):
        pass
    assert watch.phases == []
    assert "weights" not in "".join(capfd.readouterr()).replace("Loading weights", "")
