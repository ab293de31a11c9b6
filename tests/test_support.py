"""docs/support.md: every part of Quire has a row, every row has its test in its stage; a plan reports the model's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi import APIRouter
from support import gguf_case, quantized_checkpoints
from support.load_script import load_script
from transformers import AutoConfig

import quire
from quire.cli.main import app
from quire.model.support import FAMILIES, FORMS, family_support, weight_support
from quire.server import app as server_app
from quire.spec import element_formats
from quire.weights.codes.readers import GGUF_TYPES, METHODS

ROOT = Path(__file__).parents[1]
SELECTED = {"default": "", "ci": "ci", "real": "real", "llamacpp": "llamacpp"}


@pytest.fixture(scope="module")
def script() -> Any:
    """scripts/support as a module."""
    return load_script("support")


def items(script: Any, area: str) -> list[str]:
    return [row.item for row in script.rows() if row.area == area]


def test_the_page_is_what_the_script_prints(script: Any) -> None:
    assert (ROOT / "docs" / "support.md").read_text(encoding="utf-8") == script.page()


def test_the_package_has_the_model_types_of_their_page(script: Any) -> None:
    lines = "".join(f"{name}\t{how}\n" for name, how in script.family_lines())
    assert (Path(quire.__file__).parent / "model" / "families.txt").read_text(encoding="utf-8") == lines
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert f"all {lines.count(chr(10))} types" in page
    assert {how for _, how in script.family_lines()} == FAMILIES.keys()


def test_what_is_registered_has_a_row_and_nothing_else(script: Any) -> None:
    for area, names in script.registered().items():
        assert sorted(items(script, area)) == sorted(names), area
    assert FORMS.keys() == {
        *element_formats(),
        *METHODS,
        *(f"GGUF {name}" for name in GGUF_TYPES),
        "int8",
        "int4",
    }


def test_every_route_has_a_row(script: Any) -> None:
    """Those of each router of the modules that the application takes routers from."""
    routers = [
        router
        for module in vars(server_app).values()
        if isinstance(module, ModuleType)
        for router in vars(module).values()
        if isinstance(router, APIRouter)
    ]
    shown = {str(getattr(route, "path", "")) for router in routers for route in router.routes}
    assert len(shown) > 20
    used = set()
    for path in shown:
        (route,) = [
            route
            for route in script.ROUTES
            if path == route or path.startswith(route.rstrip("/") + "/" if route != "/" else "//")
        ]
        used.add(route)
    assert used == script.ROUTES.keys()


def test_a_level_above_experimental_has_a_test_and_no_other_has(script: Any) -> None:
    for row in script.rows():
        assert bool(row.test) == (row.level in ("proved", "works")), row
        assert row.note or row.level == "works", row
        if row.test:
            assert script.stage_of(row.test) in script.STAGES


@pytest.mark.parametrize(
    ("test", "stage"),
    [
        ("exact/test_engine.py::test_exact", "default"),
        ("exact/test_engine.py::test_exact_at_every_block_size", "ci"),
        ("server/test_overload.py::test_nothing_stays_of_what_was_answered_or_refused", "ci"),
        ("model/test_model_rules.py::test_gone", None),
        ("real/test_float32.py::test_chunked_batched_and_hit", "real"),
        ("compare/test_llama_cpp.py::test_logits_are_those_of_llama_cpp", "llamacpp"),
        ("exact/test_gone.py::test_exact", None),
    ],
)
def test_a_stage_is_read_off_the_markers(script: Any, test: str, stage: str | None) -> None:
    if stage is None:
        with pytest.raises(LookupError, match="which is not in tests/"):
            script.stage_of(test)
    else:
        assert script.stage_of(test) == stage


@pytest.mark.ci  # it collects some forty files
@pytest.mark.parametrize("stage", SELECTED)
def test_the_stage_has_the_test(script: Any, stage: str) -> None:
    named = {row.test for row in script.rows() if row.test and script.stage_of(row.test) == stage}
    files = sorted({str(ROOT / "tests" / test.partition("::")[0]) for test in named})
    selection = ["-m", SELECTED[stage]] if SELECTED[stage] else []
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *selection]
    found = subprocess.run([*command, *files], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stdout[-2000:]
    collected = {line.partition("[")[0].removeprefix("tests/") for line in found.stdout.splitlines()}
    assert named
    assert named <= collected


# -- the model's lines of a plan ---------------------------------------------------------------------------


def lines_of(source: Path | str | None, **options: Any) -> dict[str, str]:
    found = quire.plan(source, context=16, kv_memory="1MiB", **options)
    text = str(found).splitlines()
    for one in found.support:
        assert any(line.endswith(str(one)) for line in text)
    return {f"{one.part} {one.name}": one.level for one in found.support}


def test_a_plan_tells_the_type_and_the_form_of_weights(tmp_path: Path) -> None:
    assert lines_of(None) == {"family qwen3": "proved", "weights bfloat16": "proved"}
    assert lines_of(None, weights="int4:64") == {
        "family qwen3": "proved",
        "weights bfloat16": "proved",
        "weights int4:64": "works",
        "weights int8": "works",  # of the head
    }
    quantized_checkpoints.save(
        tmp_path / "awq", quantized_checkpoints.tiny(), *quantized_checkpoints.FORMATS["awq"]
    )
    assert lines_of(tmp_path / "awq")["weights awq"] == "works"
    file = gguf_case.write(tmp_path / "m.gguf", gguf_case.tiny())
    assert lines_of(file) == {"family qwen3": "proved", "weights GGUF Q8_0": "proved"}
    AutoConfig.for_model("gpt_neo", num_layers=2, attention_types=[[["global"], 2]]).save_pretrained(
        tmp_path / "own"
    )
    assert "by its own forward" in str(quire.plan(tmp_path / "own", kv_memory="1MiB"))


def test_the_command_tells_it_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    app(["plan", "embedded", "--context", "16", "--json"], standalone_mode=False)
    family, weights = json.loads(capsys.readouterr().out)["support"]
    assert family == {
        "part": "family",
        "name": "qwen3",
        "level": "proved",
        "note": "float32 tokens of model.generate",
    }
    assert (weights["part"], weights["name"], weights["level"]) == ("weights", "bfloat16", "proved")


def test_what_is_not_known_is_experimental() -> None:
    assert family_support("no_such_type").level == "experimental"
    assert family_support("moshi").level == "refused"
    assert family_support("dbrx").level == "experimental"
    assert weight_support("GGUF IQ2_XXS").level == "experimental"
    assert "dequantized" in weight_support("GGUF IQ2_XXS").note
    assert weight_support("half").level == "experimental"
