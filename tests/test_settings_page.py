"""docs/settings.md: `quire serve --config` takes each profile, a model fits with it, and each figure is of its page."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from transformers import AutoConfig

import quire
from quire.config import EngineConfig
from quire.server.settings import load_config

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "settings.md").read_text(encoding="utf-8")
PROFILES = re.findall(r"^### ([^\n]*)\n\n```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FIGURES = re.findall(r"^\| (.*\d.*) \| \[([\w-]+\.md)\]\(.*\) \| `(.*)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("title", "text"), PROFILES, ids=[title for title, _ in PROFILES])
def test_a_profile_is_a_file_that_a_server_takes(
    title: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in re.findall(r'"env:(\w+)"', text):
        monkeypatch.setenv(name, f"the value of {name}")
    path = tmp_path / "quire.toml"
    path.write_text(text)
    settings, table = load_config(str(path), {})
    assert table
    EngineConfig(**table, tenant_secret=settings.tenant_secret, remote_secret=settings.remote_secret)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a model in the shape of Qwen3-0.6B; a plan reads no more."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "vocab_size": 151936}
    heads = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = AutoConfig.for_model("qwen3", **shape, **heads, max_position_embeddings=40960, dtype="bfloat16")
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("title", "text"), PROFILES, ids=[title for title, _ in PROFILES])
def test_a_model_fits_with_a_profile(title: str, text: str, model: Path) -> None:
    """One request of the longest length, in the memory of such a machine; the options go together."""
    table = tomllib.loads(text)["model"]
    context = table.get("max_model_len", 8192)
    memory = "8GB" if "8 GB" in title else "64GiB"
    plan = quire.plan(config=EngineConfig(str(model), **table), context=context, memory=memory)
    assert plan.fits, plan.reason
    assert (plan.storage, plan.max_concurrency > 0) == ("paged", True)


def test_each_profile_has_a_file() -> None:
    assert len(PROFILES) == len(re.findall(r"^### ", PAGE, re.MULTILINE)) == 10
    assert PAGE.count("```toml") == 10


def plain(text: str) -> str:
    return re.sub(r"(?<=\d) (?=\d{3}\b)", "", text)


@pytest.mark.parametrize(("figure", "page", "command"), FIGURES, ids=[page for _, page, _ in FIGURES])
def test_a_figure_is_of_its_page(figure: str, page: str, command: str) -> None:
    text = plain((DOCS / page).read_text(encoding="utf-8"))
    assert command in " ".join(text.split())
    numbers = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", plain(figure))
    assert numbers
    assert [
        number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\.?\d)", text)
    ] == []


def test_figures_in_the_text_are_in_the_table() -> None:
    """Numbers with a decimal point or of thousands: the text has none that the table lacks."""
    text, _, table = plain(PAGE).partition("\n## Figures")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    numbers = set(re.findall(r"(?<![\w.])\d+\.\d+(?!\w)|(?<![\w.])1\d{3}(?= tokens/s)", prose))
    assert numbers
    assert {number for number in numbers if number not in table} - {"0.3", "0.0"} == set()
