"""The command line as a user sees it: results on stdout; for every fault one clear line and an exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import gguf_case
from support.command_line import Run, runner

import quire
from quire.errors import with_flag_names

# Of a user who has said nothing to transformers.
_SILENT = {
    k: v for k, v in os.environ.items() if not k.startswith("HF_HUB_") and k != "TRANSFORMERS_VERBOSITY"
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["generate"], 2, "expected at least one prompt, got none"),
        (["generate", ""], 2, "got an empty one"),
        (["generate", "x", "--kv-memory", "12 bananas"], 2, "'12 bananas'"),
        (["generate", "x", "--kv-memory", "1KiB"], 2, "expected a --kv-memory of at least"),
        (
            ["generate", "x", "--storage", "growing", "--kv-memory", "1KiB"],
            2,
            "expected a --kv-memory of at least",
        ),
        (["generate", "x", "--storage", "shared"], 2, "'shared' - in --storage"),
        (["generate", "x", "--storage", "growing:together"], 2, "quire compare --growth together"),
        (["compare", "--simulate", "--reservation", "half"], 2, "expected max, pow2 or exact, got 'half'"),
        (["compare", "--simulate", "--growth", "together:0"], 2, "got 'together:0' - in --growth"),
        (["generate", "x", "--block-size", "0"], 2, "expected an integer of 1 to 512, got 0"),
        (["generate", "x", "--block-size", "513"], 2, "expected an integer of 1 to 512, got 513"),
        (["generate", "x", "--temperature", "-1"], 2, "temperature"),
        (["generate", "x", "--max-tokens", "-1"], 2, "got -1 - in --max-tokens (`max_tokens`)"),
        (["generate", "x", "--max-model-len", "1"], 2, "got 1 - in --max-model-len (`max_model_len`)"),
        (["plan", "--context", "9999999"], 2, "expected context of 1 to 2048 tokens"),
        (["plan", "--context", "0"], 2, "got 0 - in --context"),
        (["serve", "--port", "99999"], 2, "got 99999 - as --port"),
        (["generate", "x", "--disk-cache-size", "1GiB"], 2, "--disk-cache-size also --disk-cache,"),
        (["serve", "--disk-cache-size", "1GiB", "--port", "0"], 2, "--disk-cache-size also --disk-cache,"),
        (
            ["chat", "--cache-write", "through"],
            2,
            "--cache-write also --host-cache, --disk-cache or --remote-cache",
        ),
        (
            ["compare", "--reservation", "pow2", "--storages", "paged"],
            2,
            "expected contiguous among the storages",
        ),
        (["compare", "--open", "--plot", "x.png", "--block-size", "8"], 2, "got --block-size, --plot too"),
        (
            ["compare", "--open", "--reservation", "pow2", "--growth", "spread"],
            2,
            "--reservation, --growth too",
        ),
        (
            ["compare", "--open", "--storages", "paged:32"],
            2,
            "with --open, without an option, got 'paged:32'",
        ),
        (["compare", "--open", "--storages", "paged,paged"], 2, "expected each storage once"),
        (["compare", "--simulate", "--backend", "native"], 2, "expected --backend without --simulate"),
        (["explain", "x", "--tenant", "alice"], 2, "expected --config FILE with a tenant_secret in [server]"),
        (["explain", "x", "--cache-salt", "a"], 2, "expected --config FILE with a tenant_secret in [server]"),
        (["explain", "x", "--config", "no-such-file"], 2, "expected a readable TOML file, got no-such-file"),
        (["generate", "x", "--dtype", "int3"], 2, "'int3'"),
        (["generate", "x", "--model", "./no/such/folder"], 2, "no such folder"),
        (["generate", "x", "--model", "./no/such.gguf"], 2, "no such file"),
        (["serve", "no-such.gguf", "--port", "0"], 2, "no such file"),
        (["generate", "x", "--prompts", "no-such-file"], 2, "no-such-file"),
        (
            ["generate", "x", "--profile-trace", "no/such/trace.json"],
            2,
            "a writable file for the trace",
        ),
        (["generate", "x", "--max-tokens", "ten"], 2, "--max-tokens"),
        (["generate", "--frob"], 2, "--frob"),
        (["frob"], 2, "frob"),
        (["generate", "x = 1\n" * 2000], 2, "2048"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    run: Run, arguments: list[str], status: int, says: str
) -> None:
    code, out, err = run(*arguments)
    lines = [line for line in err.splitlines() if "KV cache of" not in line]
    assert (code, out) == (status, "")
    assert len(lines) == 1
    assert says in lines[0]


def test_a_plan_that_does_not_fit_names_the_flags(run: Run) -> None:
    _, out, _ = run("plan", "--context", "512", "--kv-memory", "64KiB")
    assert "raise --kv-memory or lower context to at most 16 - in --context" in out
    assert "max_model_len" not in out


def test_flags_replace_names_of_options_only() -> None:
    flags = {"max_model_len": "--max-model-len", "port": "--port", "kv_memory": "--kv-memory"}
    for message, expected in (
        ("raise kv_memory - in `max_model_len`", "raise --kv-memory - in --max-model-len (`max_model_len`)"),
        ("got 'kv_memory' in kv_memory.json - as `port`", "got 'kv_memory' in kv_memory.json - as --port"),
        ("got x - in `seed`", "got x - in `seed`"),
    ):
        assert with_flag_names(message, flags) == expected


def test_no_line_of_the_help_is_cut(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in run("--help")[1].partition("Commands:")[2]


def test_the_version_is_the_installed_packages(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(quire), "__version__", raising=False)
    monkeypatch.setattr("importlib.metadata.version", {"quire-kv": "1.2.3"}.__getitem__)
    assert quire.__version__ == "1.2.3"
    assert run("--version") == (0, "quire 1.2.3\n", "")
    assert "--version" in run("--help")[1]
    monkeypatch.delitem(vars(quire), "__version__")


@pytest.mark.parametrize(
    "arguments", [["generate", "caf\udce9"], ["fr\udcffob"], ["serve", "--host", "\udcfe"]]
)
def test_what_is_no_text_is_one_line_and_status_2(run: Run, arguments: list[str]) -> None:
    """As Python gives bytes of the command line that are not UTF-8."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "expected text in UTF-8, got '" in err
    assert f"as argument {len(arguments)}" in err


def test_a_broken_model_is_one_line_and_status_1(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((EMBEDDED / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    code, out, err = run("generate", "x", "--model", str(tmp_path))
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "safetensors" in err


def test_json_is_one_object_of_the_documented_form(run: Run) -> None:
    code, out, _ = run("generate", "def f(", "class A", "--max-tokens", "5", "--temperature", "0", "--json")
    assert code == 0
    answer = json.loads(out)
    assert set(answer) == {"outputs", "stats"}
    assert [output["prompt"] for output in answer["outputs"]] == ["def f(", "class A"]
    for output in answer["outputs"]:
        keys = ["prompt", "prompt_token_ids", "text", "token_ids", "finish_reason", "num_cached_tokens"]
        keys.append("num_tier_tokens")
        assert list(output) == keys
        assert len(output["token_ids"]) == 5
        assert output["finish_reason"] == "length"


def test_stats_are_ten_figures_for_people_and_all_in_json(run: Run) -> None:
    arguments = ("generate", "def f(", "def f(x", "--max-tokens", "5", "--temperature", "0", "--stats")
    code, out, err = run(*arguments)
    assert (code, "def f(" in out, "prompt tokens" in out) == (0, True, False)
    shown = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in err.splitlines()[1:])
    assert list(shown) == [
        "prompt tokens", "of them from the cache", "generated tokens", "time to first token, mean", "prefill", "decode",
        "KV memory at most", "blocks with content", "blocks evicted", "preemptions",
    ]  # fmt: skip
    _, _, err = run(*arguments, "--speculation", "ngram:4")
    assert re.search(r"drafts accepted +\d+ of \d+; by place \d+(, \d+){3} *\n", err)
    assert re.search(r"tokens a step with drafts +(-|\d+\.\d\d)", err)
    _, out, _ = run(*arguments, "--json")
    stats = json.loads(out)["stats"]
    counts = ("num_prompt_tokens", "num_generated_tokens", "evicted_blocks", "num_preemptions")
    labels = ("prompt tokens", "generated tokens", "blocks evicted", "preemptions")
    assert [shown[label] for label in labels] == [str(stats[name]) for name in counts]
    assert shown["of them from the cache"] == f"{stats['num_cached_tokens']} ({stats['hit_rate']:.0%})"
    assert shown["blocks with content"].startswith(f"{stats['cached']} of ")
    assert " of " in shown["KV memory at most"]
    for label in ("prefill", "decode"):
        assert float(shown[label].removesuffix(" tokens/s")) > 0


def test_a_disk_cache_serves_the_next_command(run: Run, tmp_path: Path) -> None:
    prompt = (
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"
        * 2
    )
    options = ("--max-tokens", "5", "--temperature", "0", "--json", "--disk-cache", str(tmp_path / "kv"))
    answers = []
    for _ in range(2):
        code, out, err = run("generate", prompt, *options, "--disk-cache-size", "64MiB")
        assert code == 0, err
        answers.append(json.loads(out))
    first, second = (answer["outputs"][0] for answer in answers)
    assert second["token_ids"] == first["token_ids"]
    assert first["num_tier_tokens"] == {}
    assert second["num_tier_tokens"] == {"disk": second["num_cached_tokens"]}
    assert second["num_cached_tokens"] > 0
    code, out, err = run("generate", prompt, *options, "--cache-write", "never")
    assert (code, out) == (2, "")
    assert "expected eviction or through, got 'never' - in --cache-write (`cache_write`)" in err


def test_a_profile_goes_to_stderr_and_a_trace_to_its_file(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = (
        "generate",
        "def f(",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
        "--profile-trace",
        str(trace),
    )
    code, out, err = run(*arguments)
    assert code == 0
    assert "linears" not in out
    assert "decode: 3 steps, 3 tokens" in err
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"prefill step", "decode step", "forward", "linears", "attention", "sampling"} <= names


def test_prompts_come_from_files_and_a_stream_equals_the_batch(run: Run, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("def f(\n\nclass A\n")
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('"def f("\n{"prompt": "class A"}\n')
    common = ("--max-tokens", "5", "--temperature", "0")
    _, from_lines, _ = run("generate", "--prompts", str(lines), *common)
    _, from_objects, _ = run("generate", "--prompts", str(objects), *common)
    _, streamed, _ = run("generate", "def f(", *common)
    assert from_lines == from_objects
    assert from_lines.startswith(streamed.rstrip("\n"))
    assert "class A" in from_lines


@pytest.mark.ci
def test_ctrl_c_in_the_middle_is_one_line(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "generate", "def f(", "--max-tokens", "2000", "--temperature", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    process.stdout.read(len("def f(") + 1)  # it has begun to answer
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "quire: interrupted"
    assert "Traceback" not in err


EMBEDDED = Path(__file__).parents[2] / "src/quire/weights/embedded"


def test_a_gguf_file_is_a_model(run: Run, tmp_path: Path) -> None:
    file = str(gguf_case.write(tmp_path / "tiny.gguf", gguf_case.tiny()))
    status, out, err = run("generate", "abc", "--model", file, "--max-tokens", "4", "--json")
    assert status == 0, err
    assert json.loads(out)["outputs"][0]["text"]
    status, out, err = run("compare", "--simulate", "--model", file, "--lengths", "uniform:8-32", "--json")
    assert status == 0, err
    assert "storages" in json.loads(out)


def test_transformers_is_quiet_unless_it_is_told_to_speak() -> None:
    """Its bars, and its Hub client's warnings of every try, would stand between our lines."""
    program = """
import sys
import quire
from quire.cli.main import main
sys.argv = ["quire", "--help"]
try:
    main()
except SystemExit:
    pass
from huggingface_hub.utils import logging as hub
from transformers.utils import logging
print(logging.get_verbosity(), hub.get_verbosity(), logging.is_progress_bar_enabled())
"""
    for told, seen in ({}, "40 40 False"), ({"TRANSFORMERS_VERBOSITY": "info"}, "20 40 False"):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**_SILENT, **told},
        )
        assert ran.stdout.splitlines()[-1] == seen
