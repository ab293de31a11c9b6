"""A saved proof: the same model with and without it, only under its own key, and only from an intact file."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import state_layers
from support.architectures import tiny

from quire.atomic_file import FileCalls
from quire.errors import UnsupportedModelError
from quire.model import PreparedModel
from quire.model.prove import saved_proof
from quire.model.prove.model_probe import run_probe_steps
from quire.saved_folder import SavedFolder
from quire.weights import load

pytest.importorskip("quire._native")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="packed weights are kept on Linux")


class Starts:
    """Starts of one saved model with one folder of packed weights; counts the proofs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.kept, self.num_probes = folder / "model", folder / "kept", 0
        self.kept.mkdir()
        module = sys.modules["quire.model.prepare"]
        probe = module.Probe

        def count(prepared: PreparedModel, **options: Any) -> Any:
            self.num_probes += 1
            return probe(prepared, **options)

        monkeypatch.setattr(module, "Probe", count)

    def save(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Starts:
        tiny(name).to(dtype).save_pretrained(self.model)
        return self

    def start(self, *, kept: bool = True, max_model_len: int | None = None) -> tuple[PreparedModel, bool]:
        """The model ready, and whether it was proved now."""
        before = self.num_probes
        folder = SavedFolder(self.kept) if kept else None
        prepared = PreparedModel(
            load(self.model), backend="native", max_model_len=max_model_len, packed_weights=folder
        )
        return prepared, self.num_probes > before

    def proofs(self) -> list[Path]:
        return sorted(self.kept.glob("*.proof"))


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(tmp_path, monkeypatch)


# whole decoder; rms from 1 and caps, no decoder; halves in parallel; layer norms; replaced forwards and experts
@pytest.mark.parametrize(
    ("name", "dtype"),
    [  # each by default in one type
        pytest.param(name, dtype, marks=[pytest.mark.ci] * ((number + place) % 2))
        for number, name in enumerate(
            ["gemma2", "qwen3", "cohere2", "starcoder2", "qwen3_moe", "phi3", "gpt2"]
        )
        for place, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
    ids=str,
)
def test_a_start_with_a_kept_proof_runs_the_same_and_proves_nothing(
    starts: Starts, name: str, dtype: torch.dtype
) -> None:
    starts.save(name, dtype)
    plain, _ = starts.start(kept=False)
    expected, fused = run_probe_steps(plain), plain.fused
    assert fused is not None
    for proved_now in (True, False, False):
        prepared, proved = starts.start()
        assert proved == proved_now
        assert prepared.fused is not None
        assert prepared.fused.counts == fused.counts
        assert (prepared.decoder is None) == (plain.decoder is None)
        assert torch.equal(run_probe_steps(prepared), expected)
        replaced = [n for n, m in prepared._model.named_modules() if "forward" in m.__dict__]
        assert replaced == [n for n, m in plain._model.named_modules() if "forward" in m.__dict__]
        prepared.restore()
        assert not any("forward" in module.__dict__ for module in prepared._model.modules())
    assert len(starts.proofs()) == 1


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_states_are_proved_by_the_first_start_alone(
    starts: Starts, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, proved = sys.modules["quire.model.state.serve_states"], []
    real = serve.prove_states
    monkeypatch.setattr(
        serve, "prove_states", lambda adapters: (proved.append(len(adapters)), real(adapters))
    )
    state_layers.tiny_model(name).to(torch.bfloat16).save_pretrained(starts.model)
    expected = None
    for num_proved in (1, 1):
        prepared, _ = starts.start()
        assert len(proved) == num_proved
        got = run_probe_steps(prepared)
        assert expected is None or torch.equal(got, expected)
        expected = got
        prepared.restore()
    monkeypatch.setattr(saved_proof.transformers, "__version__", "5.99.0")
    starts.start()[0].restore()
    assert len(proved) == 2


def test_states_that_compute_something_else_are_refused_beside_packed_weights(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_layers.tiny_model("bamba").to(torch.bfloat16).save_pretrained(starts.model)
    loaded = load(starts.model)
    mixer = next(module for module in loaded.model.modules() if hasattr(module, "A_log"))
    real = type(mixer).forward
    monkeypatch.setattr(type(mixer), "forward", lambda *args, **kwargs: 1.01 * real(*args, **kwargs))
    with pytest.raises(
        UnsupportedModelError, match="expected layer 0's BambaMixer to compute what quire knows"
    ):
        PreparedModel(loaded, backend="native", packed_weights=SavedFolder(starts.kept))
    assert starts.proofs() == []
    assert not any("forward" in module.__dict__ for module in loaded.model.modules())


def test_sinks_are_proved_at_every_start(starts: Starts) -> None:
    starts.save("gpt_oss")
    assert [starts.start()[1] for _ in range(2)] == [True, True]
    assert starts.proofs() == []


def test_what_a_proof_follows_from_makes_another_key(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.save("qwen3")
    assert starts.start()[1]
    assert not starts.start()[1]
    assert starts.start(max_model_len=32)[1]
    monkeypatch.setattr(saved_proof.transformers, "__version__", "5.99.0")
    assert starts.start()[1]
    monkeypatch.undo()
    real = saved_proof._own_files
    monkeypatch.setattr(saved_proof, "_own_files", lambda: real()[:-1])  # a source file is gone
    before = len(starts.proofs())
    starts.start()
    assert len(starts.proofs()) == before + 1


def test_a_norm_that_changed_in_place_is_another_model(starts: Starts) -> None:
    """Its file keeps its size and its times, so that the packed weights are mapped: the proof's key has its bytes."""
    starts.save("qwen3", torch.float32)
    assert starts.start()[1]
    (path,) = starts.model.glob("*.safetensors")
    status, content = path.stat(), bytearray(path.read_bytes())
    head = int.from_bytes(content[:8], "little")
    begin = json.loads(content[8 : 8 + head])["model.norm.weight"]["data_offsets"][0]
    content[8 + head + begin + 3] ^= 0x80  # the sign of its first element
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    names = [proof.name for proof in starts.proofs()]
    starts.start()
    assert [proof.name for proof in starts.proofs()] != names


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "not ours"])
def test_a_damaged_file_is_proved_and_written_again(starts: Starts, damage: str) -> None:
    starts.save("qwen3")
    starts.start()
    (path,) = starts.proofs()
    good = path.read_bytes()
    flipped = good[:-20] + bytes([good[-20] ^ 1]) + good[-19:]
    path.write_bytes({"cut": good[:-1], "bit": flipped, "empty": b"", "not ours": b"{}"}[damage])
    assert starts.start()[1]
    assert path.read_bytes() == good
    assert not starts.start()[1]


def test_a_model_that_is_refused_is_refused_again(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.save("qwen3")
    monkeypatch.setattr("quire.model.prove.model_probe.rows_agree", lambda *_: (False, 1.0, 0.0))
    for _ in range(2):
        with pytest.raises(UnsupportedModelError):
            starts.start()
    assert starts.proofs() == []


def test_a_proof_that_cannot_be_written_is_one_warning(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts.save("qwen3")
    starts.start()
    starts.proofs()[0].unlink()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileCalls, "write", full)
    with caplog.at_level(logging.WARNING, logger="quire"):
        prepared, proved = starts.start()
    assert proved
    assert prepared.decoder is not None
    [said] = [record.message for record in caplog.records if "proof" in record.message]
    assert said.startswith(f"the proof of the model is not saved in {starts.kept} (No space left on device)")
    assert starts.proofs() == list(starts.kept.glob("*.partial")) == []
