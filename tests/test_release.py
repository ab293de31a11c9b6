"""The wheels' configuration, and `scripts/release` in a scratch repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    return yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())


# -- wheels ------------------------------------------------------------------------------------------


def test_wheels_are_built_for_each_python_on_both_processors_and_each_is_tried(
    project: dict[str, Any], workflow: dict[Any, Any]
) -> None:
    wheels = project["tool"]["cibuildwheel"]
    assert wheels["build"] == [f"cp3{minor}-*" for minor in (11, 12, 13, 14)]
    assert wheels["linux"]["archs"] == ["native"]
    assert {wheels["linux"][f"manylinux-{name}-image"] for name in ("x86_64", "aarch64")} == {
        "manylinux_2_28"
    }
    assert wheels["test-command"].startswith("quire generate ")
    assert "--backend native" in wheels["test-command"]
    assert workflow["jobs"]["wheels"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    told = [name for name in project["project"]["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert told == [f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)]
    assert project["project"]["requires-python"] == ">=3.11"


def test_only_a_tag_is_published_without_a_password_and_all_files_or_none(workflow: dict[Any, Any]) -> None:
    assert workflow[True]["push"] == {"tags": ["v*"]}  # YAML 1.1 reads `on` as true
    publish = workflow["jobs"]["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(publish["needs"]) == {"wheels", "sdist"}
    assert publish["permissions"] == {"id-token": "write"}
    *_, upload = publish["steps"]
    assert upload["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "with" not in upload
    assert workflow["permissions"] == {"contents": "read"}
    num_wheels = 4 * 2
    assert f"= {num_wheels}\n" in publish["steps"][1]["run"]


def test_a_wheel_runs_on_processors_that_the_machine_it_was_built_on_does_not_know() -> None:
    """Flags of an instruction set are those of the variants, which are chosen at run time."""
    files = [ROOT / "CMakeLists.txt", *(ROOT / "native").rglob("*.cmake")]
    lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    found = [
        line
        for line in lines
        if not line.startswith("#") and re.search(r"-m(arch|tune|cpu|avx|amx|fma)", line)
    ]
    assert found
    for line in found:
        assert line.startswith("set(QUIRE_FLAGS_"), f"flags that are not of a variant: {line}"
        assert not re.search("-m(arch|tune|cpu)", line), line


def test_the_installation_shows_its_progress_and_says_how_long_it_takes() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^.*pip install.*$", readme, re.MULTILINE)
    assert [line for line in commands if re.search(r"\s(-q+|--quiet)\s", line)] == []
    assert re.search(r"The installation takes about \w+ minutes", readme)


# -- a release ---------------------------------------------------------------------------------------


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with what the script reads, at version 0.1.0."""
    folder = tmp_path / "clone"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/release", folder / "scripts/release")
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.1.0"\nother = "0.1.0"\n')
    (folder / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.0.1 (2020-01-01)\n\n- Old.\n"
    )
    _git(tmp_path, "init", "-q", "-b", "main", str(folder))
    _git(folder, "config", "user.name", "somebody")
    _git(folder, "config", "user.email", "somebody@example.org")
    _commit(folder)
    return folder


def _commit(folder: Path) -> None:
    _git(folder, "add", "-A")
    _git(folder, "commit", "-qm", "a change")


def _release(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [folder / "scripts/release", *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@needs_git
def test_a_release_is_a_commit_and_a_tag_and_pushes_nothing(clone: Path) -> None:
    code, told = _release(clone, "0.2.0")
    assert code == 0, told
    assert "git push --atomic origin HEAD v0.2.0" in told  # there is no such remote
    project = (clone / "pyproject.toml").read_text()
    assert 'version = "0.2.0"\nother = "0.1.0"' in project
    changes = (clone / "CHANGELOG.md").read_text()
    assert re.search(r"## Unreleased\n\n## 0\.2\.0 \(\d{4}-\d\d-\d\d\)\n\n- New\.\n\n## 0\.0\.1", changes)
    assert _git(clone, "tag", "--list") == "v0.2.0"
    assert _git(clone, "rev-parse", "v0.2.0^{commit}") == _git(clone, "rev-parse", "HEAD")
    assert "- New." in _git(clone, "tag", "-n9", "v0.2.0")
    assert "- Old." not in _git(clone, "tag", "-n9", "v0.2.0")
    assert _git(clone, "status", "--porcelain") == ""
    code, told = _release(clone, "0.2.1")  # nothing has changed since
    assert (code, "expected lines under '## Unreleased'" in told) == (1, True)


@needs_git
def test_the_version_that_was_never_tagged_is_a_first_release(clone: Path) -> None:
    assert _release(clone, "0.1.0")[0] == 0
    assert _git(clone, "tag", "--list") == "v0.1.0"


@needs_git
@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.2", "expected a version X.Y.Z, got '0.2'"),
        ("v0.2.0", "expected a version X.Y.Z"),
        ("0.02.0", "expected a version X.Y.Z"),
        ("0.0.9", "newer than pyproject.toml's 0.1.0, got 0.0.9"),
        ("0.4.0", "v0.4.0 is there"),
        ("0.3.9", "newer than the newest tag's 0.4.0"),
    ],
)
def test_a_wrong_version_changes_nothing(clone: Path, version: str, said: str) -> None:
    _git(clone, "tag", "v0.4.0")
    head = _git(clone, "rev-parse", "HEAD")
    code, told = _release(clone, version)
    assert (code, said in told) == (1, True), told
    assert (_git(clone, "rev-parse", "HEAD"), _git(clone, "status", "--porcelain")) == (head, "")
    assert _git(clone, "tag", "--list") == "v0.4.0"


@needs_git
def test_a_tree_with_changes_is_refused(clone: Path) -> None:
    (clone / "new.py").write_text("")
    code, told = _release(clone, "0.2.0")
    assert (code, "expected a clean working tree" in told, "new.py" in told) == (1, True, True)
    assert _git(clone, "tag", "--list") == ""
