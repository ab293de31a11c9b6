"""An option's keyword, flag and TOML key take the same values and refuse the same."""

from __future__ import annotations

import re
import tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from quire.cli import options
from quire.cli.main import app
from quire.config import EngineConfig, with_flags
from quire.errors import ArgumentError
from quire.server import settings
from quire.server.settings import ServerLimits, ServerSettings, load_config

NUMBERS = [
    0,
    1,
    2,
    16,
    300,
    65536,
    2**53 + 1,
    2**70,
    -1,
    0.0,
    0.5,
    1.5,
    16.0,
    1e9,
    float("inf"),
    float("nan"),
]
TEXTS = [
    "0", "16", "65536", "9007199254740993", "0.5", "1.5", "1e3", "auto", "25%", "0%", "101%", "64KiB", "1.5MiB", "1.5B",
    "1 GiB", "-1", "nan", "x", "", " ", "int8", "int4:64", "*.mlp.*=int4,*=int8", "first:2=bf16", "k8v4", "bf16",
    "bfloat16", "paged:32", "contiguous:pow2", "growing:together:256", "virtual:256KiB", "virtual", "swap",
    "recompute", "through", "native", "redis://there:1", "env:QUIRE_NOT_SET", "tcp://127.0.0.1:1",
    "127.0.0.1:1",
]  # fmt: skip
OTHERS = [True, False, [], {}, {"default": "int8"}, {"*.mlp.*": "int4"}, {"default": "int3"}]
VALUES = [*NUMBERS, *TEXTS, *OTHERS]
# What an option says something about, or it is refused alone.
BESIDE: dict[str, dict[str, Any]] = {
    "piece_size": {"storage": "virtual"},
    "fast": {"device": "cuda"}, "head": {"weights": "int8"}, "disk_cache_size": {"disk_cache": "d"},
    "disk_cache_min_free": {"disk_cache": "d"},
    "peer_listen": {"host_cache": "1MiB", "cache_write": "through"},
    "cache_write": {"host_cache": "1MiB"}, "kv_events_replay": {"kv_events": "tcp://127.0.0.1:2"},
}  # fmt: skip
HINTS = get_type_hints(EngineConfig)
OPTIONS = [entry.name for entry in fields(EngineConfig) if not EngineConfig.options()[entry.name].is_secret]


def kinds_of(name: str) -> set[type]:
    """What an option's type names of bool, int and float; str stands for all else but None."""
    hint = HINTS[name]
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return {part if part in (bool, int, float) else str for part in parts if part is not NoneType}


def refused(name: str, text: str) -> str:
    """Checks that a refusal names the option, as one way or the other writes it."""
    assert name in text or options.flag(name) in text, f"{name} is not named: {text}"
    return "refused"


def made_of(name: str, make: Any) -> Any:
    """What becomes of one option; sizes and shares as they are written, numbers as numbers."""
    try:
        made = make()
    except ArgumentError as error:
        return refused(name, str(error))
    value = getattr(made, name)
    others = tuple(str(getattr(made, one)) for one in ("storage", "block_size", "piece_size"))
    return (str(value) if kinds_of(name) == {int, str} else value), type(value) is bool, others


def toml_of(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "'" + value + "'"
    if isinstance(value, dict):
        return "{" + ", ".join(f"'{key}' = {toml_of(one)}" for key, one in value.items()) + "}"
    return repr(value)


@cache
def command_of_options() -> tuple[Any, list[dict[str, Any]]]:
    """A command with all flags of the engine, and what its calls were given, the newest last."""
    seen: list[dict[str, Any]] = []

    def verb(**engine: Any) -> None:
        seen.append(engine)

    app = typer.Typer()
    app.command()(options.engine_flags()(verb))
    return typer.main.get_command(app), seen


def given(*words: str) -> dict[str, Any]:
    """What a verb's function gets of a command line."""
    command, seen = command_of_options()
    command.main(args=list(words), standalone_mode=False)
    return seen.pop()


def by_toml(table: str, name: str, value: Any) -> tuple[ServerSettings, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quire.toml"
        path.write_text(f"[{table}]\n{name} = {toml_of(value)}\n")
        return load_config(str(path), {})


def same(one: Any, other: Any) -> bool:
    return one == other or repr(one) == repr(other)  # a NaN is not equal to itself


@pytest.mark.parametrize("name", OPTIONS)
def test_an_engines_option_is_the_same_by_keyword_flag_and_file(name: str) -> None:
    kinds, beside = kinds_of(name), BESIDE.get(name, {})
    num_taken = 0
    for value in VALUES:
        keyword = made_of(name, lambda value=value: EngineConfig(**{**beside, name: value}))
        file = made_of(
            name, lambda value=value: EngineConfig(**{**beside, **by_toml("model", name, value)[1]})
        )
        assert same(keyword, file), f"{name}={value!r}: {keyword} by keyword, {file} in a file"
        num_taken += keyword != "refused"
        # A flag's text is a text, or the number that it says: an option of numbers has no text, one of texts no number.
        if kinds == {bool} or isinstance(value, dict | list):
            continue
        if (str if isinstance(value, str) else int) not in {str if kind is str else int for kind in kinds}:
            continue
        told = given(options.flag(name), str(value))
        flag = made_of(name, lambda told=told: EngineConfig(**with_flags(beside, told)))
        assert same(keyword, flag), f"{name}={value!r}: {keyword} by keyword, {flag} by flag"
    assert num_taken, f"no value here is one of {name}"


@pytest.mark.parametrize("name", [name for name in OPTIONS if HINTS[name] is bool])
def test_a_flag_says_yes_and_no_whatever_a_file_says(name: str) -> None:
    for value in (True, False):
        flag = options.flag(name if value else f"no_{name}")
        told = given(flag)
        assert told == {name: value}
        table = by_toml("model", name, not value)[1] | BESIDE.get(name, {})
        assert getattr(EngineConfig(**with_flags(table, told)), name) is value


SERVER = {
    "host": ["127.0.0.1", "::1", "[::1]", "localhost", "0.0.0.0", "", 5, True],
    "port": [0, 8000, 65535, 65536, -1, 8000.0, 0.5, "8000", True, float("nan")],
    "served_model_name": ["m", "", 5, True],
    "insecure": [True, False, 1, "yes"],
    "trust_loopback": [True, False, 0, "no"],
    "log_requests": [True, False, 1, "yes"],
    "allowed_origins": [["http://a.b"], ["http://a.b", "https://c.d"], [], ["*"], [5], "http://a.b", 5],
    "trusted_proxies": [["10.0.0.7"], ["10.0.0.0/8", "::1"], [], ["x"], [5], "10.0.0.7", 5],
    "drain_seconds": [0, 30, 0.5, -1, float("inf"), float("nan"), True, "30"],
    "warm": ["prompts.jsonl", "", 5, True],
    "prepare_next_turn": [0, 4096, -1, 0.5, True],
    "session_from_user_id": [True, False, 1, "yes"],
}
SERVER_FLAGS = (
    "host",
    "port",
    "served_model_name",
    "insecure",
    "trust_loopback",
    "log_requests",
    "allowed_origins",
    "prepare_next_turn",
    "session_from_user_id",
    "warm",
)


def by_server_flag(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> Any:
    """The settings that `quire serve` makes of a flag."""
    seen: list[Any] = []

    def load(path: str | None, flags: dict[str, Any]) -> Any:
        try:
            seen.append(load_config(path, flags)[0])
        except ArgumentError as error:
            seen.append(error)
        raise KeyboardInterrupt

    monkeypatch.setattr(settings, "load_config", load)
    flag = options.flag(name)
    if isinstance(value, bool):
        words = [flag if value else options.flag(f"no_{name}")]
    else:
        words = [word for one in (value if isinstance(value, list) else [value]) for word in (flag, str(one))]
    done = CliRunner().invoke(app, ["serve", *words], env={"COLUMNS": "400", "TERM": "dumb"})
    if not seen:
        return refused(name, done.output)
    if isinstance(seen[0], ArgumentError):
        return refused(name, str(seen[0])) if "API keys" not in str(seen[0]) else "refused"
    return getattr(seen[0], name)


@pytest.mark.parametrize("name", list(SERVER))
def test_a_servers_option_is_the_same_by_keyword_flag_and_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in SERVER[name]:

        def outcome(make: Any) -> Any:
            try:
                return getattr(make(), name)
            except ArgumentError as error:
                return "refused" if "API keys" in str(error) else refused(name, str(error))

        keyword = outcome(lambda value=value: ServerSettings(**{name: value}))
        file = outcome(lambda value=value: by_toml("server", name, value)[0])
        assert same(keyword, file), f"{name}={value!r}: {keyword} by keyword, {file} in a file"
        texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
        is_flag = name in SERVER_FLAGS and isinstance(value, bool) == (type(SERVER[name][0]) is bool)
        if is_flag and (bool(texts) != (name == "port")):
            if isinstance(value, str) and name == "allowed_origins":
                continue  # one flag is a list of one
            flag = by_server_flag(monkeypatch, name, value)
            assert same(keyword, flag), f"{name}={value!r}: {keyword} by keyword, {flag} by flag"


@pytest.mark.parametrize("name", [entry.name for entry in fields(ServerLimits)])
def test_a_servers_limit_is_the_same_by_keyword_and_file(name: str) -> None:
    for value in [1, 300, 2**40, 0, -1, 0.5, 1.0, True, "300", "", [1]]:

        def outcome(make: Any) -> Any:
            try:
                return getattr(make(), name)
            except ArgumentError as error:
                return refused(name, str(error))

        keyword = outcome(lambda value=value: ServerLimits(**{name: value}))
        file = outcome(lambda value=value: by_toml("server", name, value)[0].limits)
        assert same(keyword, file), f"{name}={value!r}: {keyword} by keyword, {file} in a file"
        assert (keyword == "refused") == (type(value) is not int or value < 1)


def test_every_option_of_a_server_is_tried() -> None:
    told = {entry.name for entry in fields(ServerSettings)}
    made = {
        "limits",
        "keys",
        "tenants",
        "tenant_secret",
        "remote_secret",
        "warnings",
    }  # of keys, files and secrets
    assert told - made == set(SERVER)
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output
    flags = {name for name in SERVER if re.search(rf"{options.flag(name)}\b", shown)}
    assert flags == set(SERVER_FLAGS)


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("300", 300.0), ("0.5", 0.5)])
def test_seconds_are_a_flags_text(text: str, seconds: float) -> None:
    assert EngineConfig(**given("--idle-trim", text)).idle_trim == seconds
