"""Each command that reads a model takes it as `--model M`, and as its argument if it has no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from support import gguf_case

from quire.cli.main import app
from quire.errors import ArgumentError

EMBEDDED = Path(__file__).parents[2] / "src/quire/weights/embedded"
# Those that read a model, and what else they need to come to it. The others read a cache's folder or ask a server.
WITH_MODEL: dict[str, list[str]] = {
    "generate": ["a prompt"],
    "chat": [],
    "cluster serve": ["--replicas", "2"],
    "cluster yaml": [],
    "compare": ["--simulate"],
    "explain": ["a prompt", "--disk-cache", "no-such-folder"],
    "plan": [],
    "score": ["a file"],
    "serve": ["--port", "0"],
    "simulate": ["a trace", "--measure"],
    "why": ["two files"],
}
WITHOUT = (
    "top",
    "cache ls",
    "cache prune",
    "cache rm",
    "cache verify",
    "cache weights",
    "cluster status",
    "cluster stop",
)
OWN_ARGUMENT = {
    "generate": ["prompt"],
    "explain": ["prompt"],
    "score": ["files"],
    "simulate": ["trace"],
    "why": ["first", "second"],
}


def commands(group: Any = None, above: str = "") -> dict[str, Any]:
    found = {}
    for name, command in (group or typer.main.get_command(app)).commands.items():
        inner = hasattr(command, "commands")
        found |= commands(command, f"{above}{name} ") if inner else {above + name: command}
    return found


def run(*arguments: str) -> None:
    app(list(arguments), standalone_mode=False)


def test_every_command_is_told_apart() -> None:
    assert set(commands()) == {*WITH_MODEL, *WITHOUT}


@pytest.mark.parametrize("name", WITH_MODEL)
def test_the_model_is_a_flag_and_the_argument_where_there_is_no_other(name: str) -> None:
    by_kind: dict[str, dict[str, Any]] = {"argument": {}, "option": {}}
    for parameter in commands()[name].params:
        by_kind[parameter.param_type_name][parameter.name] = parameter
    assert by_kind["option"]["model"].opts == ["--model", "-m"]
    assert list(by_kind["argument"]) == OWN_ARGUMENT.get(name, ["model_argument"])
    if name not in OWN_ARGUMENT:
        assert by_kind["argument"]["model_argument"].metavar == "MODEL"
        assert not by_kind["argument"]["model_argument"].required


@pytest.mark.parametrize("name", WITHOUT)
def test_the_others_take_none(name: str) -> None:
    assert not {"model", "model_argument"} & {parameter.name for parameter in commands()[name].params}


# The YAML may be for another machine, which has the model.
@pytest.mark.parametrize("name", sorted(WITH_MODEL.keys() - OWN_ARGUMENT.keys() - {"cluster yaml"}))
def test_flag_and_argument_are_the_same_and_may_not_differ(name: str) -> None:
    rest = WITH_MODEL[name]
    for model in (["./a"], ["--model", "./a"], ["-m", "./a"], ["./a", "--model", "./a"]):
        with pytest.raises(ArgumentError, match=r"got '\./a': there is no such folder"):
            run(*name.split(), *model, *rest)
    with pytest.raises(
        ArgumentError, match=r"expected one model, got '\./a' and --model \./b; leave out one"
    ):
        run(*name.split(), "./a", "--model", "./b", *rest)


@pytest.mark.parametrize("model", [["embedded"], ["--model", "embedded"], []])
def test_the_embedded_model_has_a_name(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run("plan", *model, "--context", "64", "--json")
    assert json.loads(capsys.readouterr().out)["model"] == "embedded"


def test_the_embedded_model_wins_over_that_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text('[model]\nmodel = "./a"\n')
    with pytest.raises(ArgumentError, match=r"'\./a'"):
        run("plan", "--config", str(file))
    run("plan", "embedded", "--config", str(file), "--json")
    assert json.loads(capsys.readouterr().out)["model"] == "embedded"


@pytest.mark.parametrize("name", ["generate", "explain"])
def test_a_model_in_the_place_of_a_prompt_is_refused(name: str, tmp_path: Path) -> None:
    """Where others take it; continued as a text it would answer nothing that was asked."""
    file = str(gguf_case.write(tmp_path / "tiny.gguf", gguf_case.tiny()))
    rest = ["--disk-cache", str(tmp_path)] if name == "explain" else []
    for model in (str(EMBEDDED), file):
        with pytest.raises(ArgumentError, match=r"expected a prompt, got the model .*; give it with --model"):
            run(name, model, *rest)
    goes_on = "expected a folder with a disk cache" if name == "explain" else r"'\./a'"
    with pytest.raises(ArgumentError, match=goes_on):  # a model is named: whatever the prompt is, it is one
        run(name, file, "--model", "./a", *rest)
