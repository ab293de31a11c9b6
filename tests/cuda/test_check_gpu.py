"""scripts/check-gpu: each check is a line of the table, and none that fails, hangs or crashes takes another with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.until import until

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "check-gpu"

# The script with a stage of its own: one that ends well, each way to end badly, and one that ends well again.
TRIAL = f"""
import importlib.machinery, importlib.util, os, signal, sys, time
loader = importlib.machinery.SourceFileLoader("check_gpu", {str(SCRIPT)!r})
spec = importlib.util.spec_from_loader("check_gpu", loader)
check_gpu = sys.modules["check_gpu"] = importlib.util.module_from_spec(spec)
loader.exec_module(check_gpu)
check_gpu.STAGES["trial"] = 60
check_gpu.CHECKS["trial"] = []

@check_gpu.check("trial", "first")
def first(place):
    yield "first", "1 | 2"

@check_gpu.check("trial", "wrong")
def wrong(place):
    yield "half", "done"
    raise ValueError("expected 1, got 2")

@check_gpu.check("trial", "crashes")
def crashes(place):
    os.kill(os.getpid(), signal.SIGSEGV)
    yield "never", ""

@check_gpu.check("trial", "hangs", limit_s=0.5)
def hangs(place):
    while True:
        time.sleep(60)
    yield "never", ""

@check_gpu.check("trial", "absent")
def absent(place):
    raise check_gpu.NotBuiltError("no such part")
    yield "never", ""

@check_gpu.check("trial", "of a card", needs_card=True)
def of_a_card(place):
    yield "never", ""

@check_gpu.check("trial", "last")
def last(place):
    yield "last", place.name

if __name__ == "__main__":
    sys.exit(check_gpu.main())
"""


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(program), *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
    )


def test_one_bad_check_is_one_line(tmp_path: Path) -> None:
    program = tmp_path / "trial.py"
    program.write_text(TRIAL)
    result = run(program, "--interpret", "trial", "--log", str(tmp_path / "log"))
    table = result.stdout.partition("|---|---|---|---|\n")[2].splitlines()
    assert table[:8] == [
        "| trial | first | 1 / 2 | ok |",
        "| trial | half | done | ok |",
        "| trial | wrong | ValueError: expected 1, got 2 | FAILED |",
        "| trial | crashes | its process ended with status -11 | FAILED |",
        "| trial | hangs | its limit of 3 s | FAILED |",
        "| trial | absent | no such part | not built |",
        "| trial | of a card | needs a card | - |",
        "| trial | last | cpu | ok |",
    ], result.stdout + result.stderr
    assert result.returncode == 1
    log = (tmp_path / "log").read_text()
    assert 'raise ValueError("expected 1, got 2")' in log  # the traceback
    assert "| trial | last | cpu | ok |" in log


def test_a_stage_ends_at_its_limit(tmp_path: Path) -> None:
    program = tmp_path / "trial.py"
    program.write_text(TRIAL.replace("limit_s=0.5", "limit_s=600"))
    result = run(program, "--interpret", "trial", "--limit", "4", "--log", str(tmp_path / "log"))
    assert "| trial | hangs | the stage's limit of 4 s | FAILED |" in result.stdout
    assert "| trial | last | no time was left | not run |" in result.stdout
    assert result.returncode == 1


def test_no_process_is_left_when_the_script_is_ended(tmp_path: Path) -> None:
    program, noted = tmp_path / "trial.py", tmp_path / "child"
    note = f"open({str(noted)!r}, 'w').write(str(os.getpid()) + ' ')"
    program.write_text(
        TRIAL.replace("limit_s=0.5", "limit_s=60").replace("while True:", f"{note}\n    while True:")
    )
    arguments = ["--interpret", "trial", "--log", str(tmp_path / "log")]
    script = subprocess.Popen([sys.executable, str(program), *arguments], stdout=subprocess.PIPE, cwd=ROOT)
    until(lambda: noted.exists() and noted.read_text().endswith(" "))
    child = int(noted.read_text())
    script.terminate()
    script.communicate()
    until(lambda: not Path(f"/proc/{child}").exists())


def test_an_unknown_stage_is_refused_with_the_names() -> None:
    result = run(SCRIPT, "--interpret", "light")
    assert result.returncode == 2
    assert (
        "expected stages of: first-light, compile, kernels, virtual, engine, speed, nano, sanitizer, got light"
        in (" ".join(result.stderr.split()))
    )
