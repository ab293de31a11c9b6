"""`quire plan` compared with the memory of an engine with a tokenizer of real size: four kinds of model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support import plan_run
from transformers import AutoConfig, AutoModelForCausalLM

from quire.weights.load import load

WITHIN = 0.02


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with its tokenizer as a folder in bfloat16."""
    if checkpoint.is_dir():
        return checkpoint
    made = tmp_path_factory.mktemp("folder")
    loaded = load(checkpoint, is_dense=True)
    loaded.model.save_pretrained(made)
    loaded.tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def hybrid(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of Mamba and attention layers with the checkpoint's tokenizer."""
    made = tmp_path_factory.mktemp("hybrid")
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = AutoConfig.for_model(
        "bamba", vocab_size=vocab_size, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, mamba_n_heads=16, mamba_d_head=64, mamba_d_state=64,
        attn_layer_indices=[3, 7], eos_token_id=None, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(made)
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, made)
    return made


@pytest.mark.parametrize("kind", ["gguf", "folder", "int4", "hybrid"])
def test_the_total_is_within_2_percent(kind: str, checkpoint: Path, request: pytest.FixtureRequest) -> None:
    if kind == "gguf":
        if checkpoint.is_dir():
            pytest.skip("not a GGUF file")
        model = checkpoint
    else:
        model = request.getfixturevalue("hybrid" if kind == "hybrid" else "folder")
    found = plan_run.of_model(model, "int4" if kind == "int4" else None)
    ratio = found["planned"] / found["measured"]
    rows = {part: round(num_bytes / 2**20, 1) for part, num_bytes in found["rows"].items()}
    print(f"{kind}: planned {found['planned'] / 2**20:.1f} MiB, {ratio:.3f} of what was measured; {rows}")
    assert abs(ratio - 1) <= WITHIN
