"""`EngineConfig`: every option in all its forms; invalid values are refused in one line."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_llm
from support.forked_program import run_program

from quire import LLM, AsyncEngine, config
from quire.config import EngineConfig, spelled_out, with_flags
from quire.errors import ArgumentError
from quire.server.settings import load_config
from quire.tiers.by_url import tier_from_url

# Run with the source of quire/config.py in which one line was added.
ADDED = """
import sys, types
import quire

module = types.ModuleType("quire.config")
sys.modules["quire.config"] = quire.config = module
exec(compile(open(sys.argv[1]).read(), "config.py", "exec"), module.__dict__)

import inspect
from typer.testing import CliRunner
from quire.cli.main import app
from quire.server.settings import load_config

for verb in ("generate", "chat", "serve"):
    told = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).output
    assert "--shine" in told and "How bright." in told, (verb, told)
settings, table = load_config(sys.argv[2], {})
assert module.EngineConfig(**table).shine == 7
try:
    module.EngineConfig(shine="7")
except ValueError as error:
    assert "expected an integer of 1 to 9, got '7' - in `shine`" in str(error)
from quire.engine.llm import LLM
assert inspect.signature(LLM).parameters["shine"].default == 3
from quire.engine import open_storage
from quire.spec import KVSpec
seen = []
paged = open_storage._paged
open_storage._MAKERS["paged"] = lambda config, *rest: (seen.append(config.shine), paged(config, *rest))[1]
spec = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=16)
open_storage.open_storage(module.EngineConfig(shine=5, kv_memory="1MiB"), spec, 64).storage.close()
assert seen == [5]
"""


def test_an_option_is_added_by_one_line(tmp_path: Path) -> None:
    source = Path(config.__file__).read_text()
    anchor = "    profile: bool = option("
    assert source.count(anchor) == 1
    line = '    shine: Annotated[int, _integer(1, 9)] = option(3, "N", "How bright.")\n'
    changed, toml = tmp_path / "config.py", tmp_path / "quire.toml"
    changed.write_text(source.replace(anchor, line + anchor))
    toml.write_text("[model]\nshine = 7\n")
    done = run_program(ADDED, str(changed), str(toml))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "what",
    [
        "import quire.config",
        "from quire.server.settings import load_config; load_config(None, {})",
        "from quire.cli.main import app; from typer.testing import CliRunner;"
        "assert CliRunner().invoke(app, ['generate', '--help']).exit_code == 0",
        "from quire.cli.main import app; from typer.testing import CliRunner;"
        "assert 'block_size' in str(CliRunner().invoke(app, ['chat', '--block-size', '0']).exception)",
        "from quire.cli.main import app; from typer.testing import CliRunner;"
        "assert 'kv_memory' in str(CliRunner().invoke(app, ['serve', '--kv-memory', 'x']).exception)",
    ],
)
def test_help_and_bad_options_do_not_wait_for_torch(what: str) -> None:
    code = f"import sys; {what}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": True}, "expected an integer of 1 to 512, got True - in `block_size`"),
        ({"block_size": None}, "expected an integer, got None - in `block_size`"),
        ({"max_num_seqs": "16"}, "expected an integer of 1 to 65536, got '16' - in `max_num_seqs`"),
        ({"max_model_len": 1}, "expected an integer of 2 to 2147483647, got 1 - in `max_model_len`"),
        ({"prefault": 1}, "expected a boolean, got 1 - in `prefault`"),
        ({"revision": 5}, "expected a string, got 5 - in `revision`"),
        ({"dtype": "int8"}, "expected auto, float32, bfloat16 or float16, got 'int8' - in `dtype`"),
        (
            {"kv_dtype": "int3"},
            "expected one of auto, float32, .*, int8, int4, k8v4, fp32, fp16, bf16, got 'int3' - in `kv_dtype`",
        ),
        ({"kv_dtype": {"default": "int8", "odd": "bf16"}}, "expected default, first:N, .* got 'odd' - in `kv_dtype`"),
        ({"dtype": "int3"}, "expected auto, float32, bfloat16 or float16, got 'int3' - in `dtype`"),
        ({"kv_memory": "200%"}, "expected a share above 0% and up to 100%, got '200%'"),
        ({"pin_memory": "101%"}, "expected a share of 0% to 100%, got '101%' - in `pin_memory`"),
        ({"kv_memory": True}, "got True for kv_memory, .* - in `kv_memory`"),
        ({"disk_cache": " "}, "expected a folder, got ' ' - in `disk_cache`"),
        ({"blok_size": 1}, "expected only backend, block_size, .*, got blok_size"),
        ({"preemption": "park"}, "expected auto, swap or recompute, got 'park' - in `preemption`"),
        ({"park_memory": "1MiB"}, "expected only backend, block_size, .*, got park_memory"),
        ({"storage": "heap"}, "expected paged, contiguous, growing, virtual or auto, got 'heap' - in `storage`"),
        ({"storage": "auto:3"}, "expected a storage, or one with its option .*, got 'auto:3'"),
        ({"storage": "paged:"}, "expected a storage, or one with its option .*, got 'paged:'"),
        ({"storage": "paged:1.5"}, "expected an integer of 1 to 512, got '1.5' - in `block_size`"),
        ({"storage": "growing:half"}, "growing without growth, got 'half': .* `quire compare --growth half`"),
        ({"storage": "contiguous:pow2"}, "without reservation, got 'pow2': .* `quire compare --reservation pow2`"),
        ({"growth": "together:8"}, "growing without growth, got 'together:8': .* `quire compare .*` - in `growth`"),
        ({"storage": "contiguous", "reservation": "max"}, "contiguous without reservation, got 'max': an engine has"),
        ({"storage": "paged:32", "block_size": 16}, "expected block_size once, got 32 in storage 'paged:32' and 16"),
    ],
)  # fmt: skip
def test_refused_in_our_words(options: dict[str, Any], says: str) -> None:
    for make in (EngineConfig, LLM, AsyncEngine):
        with pytest.raises(ArgumentError, match=says) as caught:
            make(**options)
        assert "\n" not in str(caught.value)
        assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("storage", "option", "value"),
    [
        ("paged:32", "block_size", 32),
        ("virtual:256KiB", "piece_size", "256KiB"),
    ],
)
def test_a_storage_and_its_option_in_one_string(
    storage: str, option: str, value: Any, tmp_path: Path
) -> None:
    name = storage.partition(":")[0]
    asked = EngineConfig(storage=storage)
    assert asked == EngineConfig(storage=name, **{option: value})
    assert asked == EngineConfig(storage=storage, **{option: value})  # said twice, and the same
    assert (asked.storage, getattr(asked, option)) == (name, value)
    path = tmp_path / "quire.toml"
    path.write_text(f'[model]\nstorage = "{storage}"\n')
    assert EngineConfig(**load_config(str(path), {})[1]) == asked


def test_flags_win_over_a_file() -> None:
    table = {"storage": "virtual:256KiB", "seed": 1}
    assert with_flags(table, {"piece_size": "8KiB"}) == {
        "storage": "virtual",
        "piece_size": "8KiB",
        "seed": 1,
    }
    assert with_flags(table, {"storage": "paged:32"}) == {"storage": "paged", "block_size": 32, "seed": 1}
    assert with_flags({"block_size": 8}, {"storage": "paged:32"}) == {"storage": "paged", "block_size": 32}
    assert with_flags(table, {}) == spelled_out(table)


def test_an_option_of_comparisons_in_a_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "quire.toml"
    for line, message in (
        ('growth = "together:256"', r"got growth - in \[model\]"),
        ('storage = "growing:together:256"', "quire compare --growth together:256"),
    ):
        path.write_text(f"[model]\n{line}\n")
        with pytest.raises(ArgumentError, match=message):
            EngineConfig(**with_flags(load_config(str(path), {})[1], {}))


def test_what_was_taken_is_taken() -> None:
    taken = EngineConfig("m", block_size=np.int64(8), kv_memory=1 << 20, disk_cache=Path("x"), pin_memory=0)
    assert (taken.model, taken.block_size, taken.disk_cache) == ("m", 8, Path("x"))
    assert type(taken.block_size) is int
    assert EngineConfig(dtype=tiny_llm.model().dtype).dtype == "float32"  # type: ignore[arg-type]
    assert "sixteen" not in repr(EngineConfig(tenant_secret=b"sixteen bytes and more"))
    for secret in ("sixteen bytes and more", b"sixteen bytes and more"):
        shared = EngineConfig(remote_cache="redis://there", remote_secret=secret)
        assert (shared.remote_secret, "sixteen" in repr(shared)) == (secret, False)
    assert replace(taken, seed=3).seed == 3
    with pytest.raises(ArgumentError, match="expected a model and options by name, got '1GiB'"):
        EngineConfig("m", "1GiB")  # type: ignore[misc]


def test_an_llm_of_a_config() -> None:
    source = (tiny_llm.model(), tiny_llm.tokenizer())
    asked = EngineConfig(kv_memory="2MiB", storage="paged:8", max_num_seqs=8)
    with LLM(source, config=asked) as llm:
        assert (llm.block_size, llm.max_num_seqs, llm.kv_memory_bytes) == (8, 8, 2 << 20)
    with LLM(config=replace(asked, model=source)) as llm:
        assert llm.block_size == 8
    for options in ({"config": asked, "seed": 1}, {"config": {"seed": 1}}):
        with pytest.raises(ArgumentError, match="expected an EngineConfig and no other options"):
            LLM(source, **options)


@pytest.mark.parametrize("face", [LLM, AsyncEngine])
def test_help_tells_the_options(face: type) -> None:
    parameters = inspect.signature(face).parameters
    assert list(parameters) == [*EngineConfig.options(), "config"]
    assert parameters["model"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert parameters["block_size"].kind is inspect.Parameter.KEYWORD_ONLY
    assert (parameters["block_size"].annotation, parameters["block_size"].default) == (int, 16)
    assert "block_size: Tokens of a block" in str(face.__init__.__doc__)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"remote_secret": "sixteen bytes and more"},
            "expected with remote_secret also remote_cache, peers or peer_",
        ),
        ({"peer_listen": "127.0.0.1:1"}, "expected with peer_listen also host_cache"),
        (
            {"peer_listen": "127.0.0.1:1", "host_cache": "1MiB"},
            "expected with peer_listen also cache_write through",
        ),
        (
            {"peer_listen": "0.0.0.0:1", "host_cache": "1MiB", "cache_write": "through"},
            "expected with peer_listen also remote_secret: other machines",
        ),
        ({"peer_secret": "sixteen bytes and more"}, "expected with peer_secret also host_cache"),
        ({"peer_secret": "sixteen", "host_cache": "1MiB"}, "got 7 bytes - in `peer_secret`"),
        (
            {"peer_listen": "there"},
            r"expected HOST:PORT, .* or unix:PATH, got \'there\' - in `peer_listen`",
        ),
        ({"peers": "there:1,,"}, r"expected HOST:PORT, .* or unix:PATH, got '' - in `peers`"),
        (
            {"remote_secret": "sixteen", "remote_cache": "redis://there"},
            "at least 16 bytes, got 7 bytes - in `remote_s",
        ),
        (
            {"remote_secret": 16, "remote_cache": "redis://there"},
            "at least 16 bytes, got int - in `remote_secret`",
        ),
        (
            {"remote_secret": "\ud800sixteen", "remote_cache": "redis://there"},
            "got 10 bytes - in `remote_secret`",
        ),
    ],
)
def test_a_secret_that_is_refused_is_not_shown(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told) as caught:
        EngineConfig(**options)
    assert "sixteen" not in str(caught.value)


def test_a_secret_is_no_flag_and_no_key_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "quire.toml"
    for name in ("tenant_secret", "remote_secret", "blok_size"):
        path.write_text(f"[model]\n{name} = 'sixteen bytes and more'\n")
        with pytest.raises(ArgumentError, match=rf"expected only .*, got {name} - in \[model\] of "):
            load_config(str(path), {})


def test_a_url_with_a_password_is_not_shown_and_may_be_a_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "redis://:open-sesame@localhost"
    assert "sesame" not in repr(EngineConfig(remote_cache=url))
    monkeypatch.setenv("QUIRE_TEST_URL", f"{url}\r\n")
    named = EngineConfig(remote_cache="env:QUIRE_TEST_URL")
    assert named.remote_cache == "env:QUIRE_TEST_URL"  # read where it is used, and nowhere kept
    seen: list[str] = []
    monkeypatch.setattr("quire.tiers.by_url._MAKERS", {"redis": seen.append})
    tier_from_url("env:QUIRE_TEST_URL")
    assert seen == [url]
    monkeypatch.delenv("QUIRE_TEST_URL")
    with pytest.raises(ArgumentError, match="QUIRE_TEST_URL, got none - in `remote_cache`"):
        EngineConfig(remote_cache="env:QUIRE_TEST_URL")


def test_what_an_engine_tells_has_no_password(caplog: pytest.LogCaptureFixture) -> None:
    with tiny_llm.llm(remote_cache="redis://:sesame@127.0.0.1:1") as llm:  # nobody listens there
        llm.generate([[5, 6, 7]])
        told = f"{llm.monitor.report()} {llm.stats()} {llm.capacity} {llm!r} {caplog.text}"
    assert "127.0.0.1:1" in told
    assert "sesame" not in told
