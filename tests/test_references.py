"""Names cited in docstrings, comments and documents exist.

    `quire.cache.cache`        a module, or a name in the code of one
    cache/cache.py, tiers.md   a file whose path ends so
    `num_held`, `check()`      a name in the code, a module, or one of `FOREIGN`
    `preemption="swap"`        of an option of the engine a value that it takes; so in a list behind (`preemption=`)

A file of the package may cite what the package and `native` have, any other file what the repository has. Replaced
identifiers in the glossary are left out. The files are read and not imported. Cost: some two seconds.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from support import glossary

from quire.config import EngineConfig

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "quire"
FOLDERS = (".ci", "benchmarks", "docs", "examples", "native", "scripts", "src", "tests", "tools")
FILES = [
    path
    for path in [
        *sorted(ROOT.iterdir()),
        *(p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*"))),
    ]
    if path.is_file() and path.suffix not in (".pyc", ".so")
]
SOURCES = [path for path in FILES if path.suffix in (".py", ".hpp", ".cpp")]
DOCUMENTS = [
    path
    for path in FILES
    if path.suffix == ".md" and path.parent in (ROOT, ROOT / "docs") and path.name != "CHANGELOG.md"
]
OF_PACKAGE = [
    path for path in SOURCES if path.is_relative_to(PACKAGE) or path.is_relative_to(ROOT / "native")
]
BESIDE = [
    path for path in FILES if path.suffix in ("", ".toml", ".pyi", ".html", ".js", ".mjs")
]  # names, no prose

# Names of other programs and libraries, and two words that a document makes itself.
FOREIGN = frozenset(
    [
        "llama.cpp",
        "use_experts_implementation",
        "modules_to_not_convert",
        "inputs_embeds",
        "decoder_input_ids",
        "TextStreamer",
        "cuMemGetAllocationGranularity",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "MTLHeap",
        "updateBufferMappings",
        "GPU",
        "pread",
        "proxy_set_header",
        "socat",
        "manylinux_2_34",
        "manylinux_2_28",
        "bs",
        "num_",
    ]
)


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a document, or of the docstrings and comments of a source file, with their numbers."""
    text = path.read_text()
    if path == glossary.PATH:
        yield from enumerate(map(glossary.without_replaced, text.splitlines()), 1)
    elif path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
    elif path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT or token.string.startswith(('"""', 'r"""')):
                yield from enumerate(token.string.splitlines(), token.start[0])
    else:
        for number, line in enumerate(text.splitlines(), 1):
            yield number, line.partition("//")[2]


@cache
def names_in(path: Path) -> frozenset[str]:
    """All names in the code of a file, docstrings and comments left out, and its own."""
    prose = {".py": r'"""[\s\S]*?"""|#.*', ".hpp": r"//.*", ".cpp": r"//.*"}.get(path.suffix)
    text = path.read_text(errors="replace")
    names = re.findall(r"\b[^\W\d]\w*\b", re.sub(prose, "", text) if prose else text)
    return frozenset([*names, path.stem, path.parent.name])


@cache
def names_of_package() -> frozenset[str]:
    return FOREIGN.union(*map(names_in, [*OF_PACKAGE, PACKAGE / "_native.pyi"]))


@cache
def names_of_repository() -> frozenset[str]:
    return names_of_package().union(*map(names_in, [*SOURCES, *BESIDE]))


@cache
def names_of_files() -> frozenset[str]:
    """Each end of each path: config.py, quire/config.py, src/quire/config.py."""
    paths = [path.relative_to(ROOT).parts for path in FILES]
    return FOREIGN.union("/".join(parts[start:]) for parts in paths for start in range(len(parts)))


def module_has(dotted: str) -> bool:
    """Folders and files as far as they go; the rest are names in the code of the last one."""
    at, parts = PACKAGE, dotted.split(".")[1:]
    while parts and (at / parts[0]).is_dir():
        at /= parts.pop(0)
    for suffix in (".py", ".pyi"):
        if parts and (at / parts[0]).with_suffix(suffix).is_file():
            return names_in((at / parts[0]).with_suffix(suffix)).issuperset(parts[1:])
    return not parts or parts[0] in names_in(at / "__init__.py")


def dead_references(line: str, known: frozenset[str]) -> Iterator[str]:
    for name in re.findall(r"(?<![\w./*<>{}-])((?:\w+/)*\w+\.(?:py|hpp|cpp|md))\b", line):
        if name not in names_of_files():
            yield name
    for name in re.findall(r"`([^\W\d]\w*(?:\.[^\W\d]\w*)*)(?:\(\)|=)?`", line):
        found = module_has(name) if name.startswith("quire.") else known.issuperset(name.split("."))
        if not found and name not in names_of_files():
            yield name


@cache
def values_of(option: str) -> tuple[str, ...]:
    """What an option of the engine takes where those are a few words; else nothing."""
    kind = get_type_hints(EngineConfig).get(option)
    return get_args(kind) if get_origin(kind) is Literal else ()


def dead_values(text: str) -> Iterator[str]:
    """Of a document: values that an option does not take."""
    told = re.findall(r'`(\w+)="(\w+)"', text)
    for option, listed in re.findall(r"\(`(\w+)=`\)[^\n]*\n+((?:[*-] .*\n(?: .*\n)*)+)", text):
        told += [(option, value) for value in re.findall(r"^[*-] `(\w+)`", listed, re.MULTILINE)]
    for option, value in told:
        if values_of(option) and value not in values_of(option):
            yield f'{option}="{value}"'


@pytest.mark.parametrize(
    "folder", sorted({path.relative_to(ROOT).parts[0] for path in [*SOURCES, *DOCUMENTS]})
)
def test_names_lead_somewhere(folder: str) -> None:
    dead: list[str] = []
    for path in [*SOURCES, *DOCUMENTS]:
        where = path.relative_to(ROOT)
        if where.parts[0] == folder and path != Path(__file__):
            known = names_of_package() if path in OF_PACKAGE else names_of_repository()
            dead += [
                f"{where}:{n}: {name}" for n, line in prose_of(path) for name in dead_references(line, known)
            ]
    assert not dead, "\n".join(dead)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_options_take_the_values_told(path: Path) -> None:
    assert not list(dead_values(path.read_text()))


def test_a_dead_name_is_found() -> None:
    line = "`quire.cache.nowhere`, cache/nowhere.py, (`nowhere`), `self.nowhere()`, `quire.cache.cache`, cache/cache.py"
    known = names_of_package()
    assert list(dead_references(line, known)) == [
        "cache/nowhere.py", "quire.cache.nowhere", "nowhere", "self.nowhere",
    ]  # fmt: skip
    assert list(dead_values("Then (`preemption=`):\n\n* `park` is\n  old\n* `swap`\n")) == [
        'preemption="park"'
    ]


def test_foreign_names_are_cited() -> None:
    prose = "\n".join(line for path in [*OF_PACKAGE, *DOCUMENTS] for _, line in prose_of(path))
    assert not [name for name in FOREIGN if name not in prose]
