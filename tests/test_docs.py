"""Every command and every example of README.md, CONTRIBUTING.md and docs/ runs here, or is named in `NOT_RUN`.

Run are: doctest examples (`>>>`); fenced `python` blocks, those of a file one after the other; fenced `sh` blocks, each
as one script. A fence without a language right behind a block is what it prints: `...` stands for anything, and any
number of milliseconds for any other. Blocks that name 127.0.0.1:8000 get a server on a free port instead.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.glossary import replaced_identifiers
from support.running_server import running
from typer.main import get_command

import quire
from quire import LLM
from quire.backends import native_module
from quire.cli.main import app
from quire.server.settings import ServerSettings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(quire.__file__).parent
EMBEDDED = PACKAGE / "weights" / "embedded"
FILES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md")))]
SHELL = ("sh", "console")

# Commands of the documents that do not run here: how they begin, and why. The longest that fits counts.
NOT_RUN = {
    ".venv/bin/quire serve": "README's main job has a test of its own",
    "python3 -m venv": "installs; .ci/run does it in a fresh folder",
    "kill %1": "README's main job has a test of its own",
    "python benchmarks/": "minutes; scripts/check-long runs each with --quick. Names and options are checked below",
    "quire compare --model": "needs the model that benchmarks/peers/setup.py makes, from the network",
    "quire simulate": "needs a public trace; tests/simulate/test_trace_simulation.py",
    "quire serve": "a fixture has what it starts; tests/cli/test_serve_process.py",
    "quire cluster": "needs Ray; tests/cluster/test_on_ray.py",
    "qwen": "comes from npm; scripts/soak agents runs it",
    "lm_eval --model": "needs lm-evaluation-harness and its tasks, from the network; scripts/lm-eval",
    "quire top": "draws until it is interrupted; tests/cli/test_top.py",
}
# Their examples call the native core by name.
NEEDS_EXTENSION = {"docs/native.md"}
# What is not there, and what takes its place here: a model of the Hub (network).
INSTEAD = {"Qwen/Qwen3-0.6B": str(EMBEDDED), "./my-model": str(EMBEDDED)}


@dataclass(frozen=True)
class Block:
    """One fenced block of a file, and what it prints, if the file says so."""

    file: str
    line: int
    language: str
    text: str
    output: str | None


def blocks_of(file: str) -> list[Block]:
    text = (ROOT / file).read_text()
    fences = list(re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    found = []
    for fence, after in zip(fences, [*fences[1:], None], strict=False):
        shown = None
        if after is not None and not after[1] and not text[fence.end() : after.start()].strip():
            shown = after[2]
        found.append(Block(file, text[: fence.start()].count("\n") + 1, fence[1], fence[2], shown))
    return found


def commands_of(block: Block) -> list[str]:
    """The commands of a shell block, comments and continuations taken away. In `console` they follow `$ `."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    lines = [re.sub(r"\s+# .*", "", line).strip() for line in lines]
    return [line for line in lines if line and not line.startswith("#")]


def why_not_run(command: str) -> str | None:
    return next(
        (NOT_RUN[start] for start in sorted(NOT_RUN, key=len)[::-1] if command.startswith(start)), None
    )


def check_output(block: Block, printed: str) -> None:
    if block.output is None:
        return
    wanted, got = (re.sub(r"\d+ ms", "N ms", text) for text in (block.output, printed))
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(wanted, got, flags), (
        f"{block.file}:{block.line} says it prints\n{block.output}\nIt prints\n{printed}"
    )


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    """Where a server of the embedded model listens, as `quire serve --kv-memory 64MiB` starts one."""
    with LLM(kv_memory="64MiB") as llm, running(llm, ServerSettings()) as (url, _):
        yield url.rpartition(":")[2]


def for_here(text: str, request: pytest.FixtureRequest) -> str:
    """With what is here in the place of what is not; a server is started only for who asks one."""
    if "127.0.0.1:8000" in text:
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{request.getfixturevalue('port')}")
    for name, here in INSTEAD.items():
        text = text.replace(name, here)
    return text


# Examples in Python


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("*.md") if ">>>" in path.read_text()))
def test_examples_print_what_they_say(name: str) -> None:
    result = doctest.testfile(str(DOCS / name), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    "file", [file for file in FILES if any(b.language == "python" for b in blocks_of(file))]
)
def test_python_blocks_run(
    file: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file in NEEDS_EXTENSION and native_module() is None:
        pytest.skip("the native extension is not built")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(file):
        if block.language != "python":
            continue
        printed = io.StringIO()
        code = compile("\n" * block.line + for_here(block.text, request), str(ROOT / file), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        check_output(block, printed.getvalue())


# Commands


SCRIPTS = [
    block
    for file in FILES
    for block in blocks_of(file)
    if block.language in SHELL and any(why_not_run(command) is None for command in commands_of(block))
]


@pytest.mark.ci  # a process for each command
@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: f"{block.file}:{block.line}")
def test_commands_run(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if "curl" in block.text and shutil.which("curl") is None:
        pytest.skip("no curl here")
    if block.file in NEEDS_EXTENSION and native_module() is None:
        pytest.skip("the native extension is not built")
    commands = [command for command in commands_of(block) if why_not_run(command) is None]
    (tmp_path / "quire").write_text(f'#!/bin/sh\nexec {sys.executable} -m quire "$@"\n')
    (tmp_path / "quire").chmod(0o755)
    (tmp_path / "prompts.txt").write_text("def f(x):\nclass A:\n")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{PACKAGE.parent}:{os.environ.get('PYTHONPATH', '')}",
        "HOME": str(tmp_path),
        "COLUMNS": "120",
    }
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", for_here("\n".join(commands), request)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, f"{block.file}:{block.line}\n{ran.stdout}\n{ran.stderr}"
    if len(commands) == len(commands_of(block)):
        check_output(block, ran.stdout)


@pytest.mark.ci
@pytest.mark.parametrize("with_curl", [False, True])
def test_the_readmes_main_job(tmp_path: Path, with_curl: bool) -> None:
    """It serves, asks and stops, with curl and with what CI has in its place; the answer is OpenAI's."""
    if with_curl and shutil.which("curl") is None:
        pytest.skip("no curl here")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        number = str(one.getsockname()[1])
    command = [sys.executable, ROOT / "scripts" / "readme-command", "main", number]
    block = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    set_up, _, job = block.partition("\n")
    assert set_up == "python3 -m venv .venv && .venv/bin/pip install ."
    job = job.replace(".venv/bin/quire", f"{sys.executable} -m quire")
    assert job.count(number) == 2
    if not with_curl:
        shutil.copy(ROOT / ".ci" / "curl", tmp_path / "curl")
    path = os.environ["PATH"] if with_curl else f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-e", "-c", f"trap 'kill %1 2> /dev/null || true' EXIT\n{job}\nwait %1"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["text"].strip()


# What the documents name


@pytest.mark.parametrize("file", FILES)
def test_commands_stand_in_fences(file: str) -> None:
    """An indented one would not be run."""
    assert not re.findall(
        r"^ {4}(?:\$ |quire |python3? |pip |curl ).*$", (ROOT / file).read_text(), re.MULTILINE
    )


@pytest.mark.parametrize("file", FILES)
def test_flags_in_the_text_exist(file: str) -> None:
    verbs: Any = get_command(app)
    for verb, rest in re.findall(r"`quire (\w+)([^`]*)`", (ROOT / file).read_text()):
        command = verbs.commands[verb]
        known = {
            name
            for one in (command, *getattr(command, "commands", {}).values())
            for p in one.params
            for name in p.opts
        }
        for flag in re.findall(r"(?<=\s)--[a-z][\w-]*", rest):
            assert flag in known, f"{file}: `quire {verb}` knows no {flag}"


def test_what_is_not_run_is_still_there() -> None:
    commands = [
        c
        for file in FILES
        for block in blocks_of(file)
        if block.language in SHELL
        for c in commands_of(block)
    ]
    unused = [start for start in NOT_RUN if not any(command.startswith(start) for command in commands)]
    assert not unused, f"in NOT_RUN, and in no document: {unused}"


@pytest.mark.parametrize("file", FILES)
def test_benchmarks_and_scripts_exist(file: str) -> None:
    text = (ROOT / file).read_text()
    for script, options in re.findall(
        r"\b(?:python )?((?:benchmarks|scripts)/[\w/-]+(?:\.py)?)((?: +--?[\w-]+[^`\n]*)?)", text
    ):
        path = ROOT / script
        assert path.exists(), f"{file} names {script}, which is not there"
        if path.suffix == ".py":
            for option in re.findall(r"(?<=\s)--[a-z][\w-]+", options.partition("#")[0]):
                assert f'"{option}"' in path.read_text(), f"{file}: {script} knows no {option}"


@pytest.mark.parametrize("file", FILES)
def test_links_lead_somewhere(file: str) -> None:
    text = (ROOT / file).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / file).parent / name if name else ROOT / file
        assert path.exists(), f"{file}: {target}"
        if anchor and path.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in anchors, f"{file}: {target}; there are {anchors}"


@pytest.mark.skipif(not (PACKAGE / "scheduler").is_dir(), reason="the tour shows the folders as they will be")
@pytest.mark.parametrize(
    "file",
    ["docs/tour.md", "docs/contracts.md", "docs/engine-builders.md", "docs/native.md", "CONTRIBUTING.md"],
)
def test_files_of_the_source_exist(file: str) -> None:
    """Paths in backticks: of src/quire or the repository; in docs/native.md of native/ too."""
    roots = [PACKAGE, ROOT, *([ROOT / "native"] if file == "docs/native.md" else [])]
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|hpp|cpp))`", (ROOT / file).read_text()):
        assert any((root / name).exists() for root in roots), f"{file} names {name}, which is not there"


def test_recipes_are_as_long_as_the_text_says() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    stated = re.findall(r"one\s+file\s+of\s+(\d+)\s+lines[^`]*`(tests/recipes/\w+\.py)`", text)
    assert len(stated) == 8
    for number, name in stated:
        assert len((ROOT / name).read_text().splitlines()) == int(number), name


def test_pages_for_a_start_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
    assert len((DOCS / "native.md").read_text().splitlines()) <= 120
    assert len((DOCS / "benchmarks.md").read_text().splitlines()) <= 200


def test_the_changelog_has_short_lines() -> None:
    """One line a capability, of at most 160 characters; at most 70 lines for a release, its headings included."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert not [line for line in text.splitlines() if len(line) > 160]
    for release in text.split("\n## ")[1:]:
        assert len(release.splitlines()) <= 70, release.partition("\n")[0]


def test_the_glossary_has_few_words_and_each_replaced_name_once() -> None:
    replaced = replaced_identifiers()
    assert 0 < len(replaced) <= 60
    names = [name for each in replaced.values() for name in each]
    assert names
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("file", FILES)
def test_lines_of_documents_are_short(file: str) -> None:
    """At most 140 characters; in docs/ tables, pictures and code are left out."""
    lines = (ROOT / file).read_text().splitlines()
    if file.startswith("docs/"):
        text = re.sub(r"^```.*?^```$", "", "\n".join(lines), flags=re.DOTALL | re.MULTILINE)
        lines = [line for line in text.splitlines() if not re.match(r" {4}| *\|| *!\[", line)]
    assert not [line for line in lines if len(line) > 140]
