"""`python tools/trace_files.py`: the files of src/quire that a decode step and a whole `generate` go through.

Lists the files that a reader must open to follow one request: each file once, in order of first touch, and how often
the calls of one thread go from one file to another. The run has the embedded model, paged storage, native kernels, a
greedy batch of two and an `LLM` without options, whose monitor keeps the events of the cache. C++ is not traced: a call
into the extension counts as part of the file that makes it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import quire
from quire import LLM, SamplingParams
from quire.engine.driver import Driver

_ROOT = str(Path(quire.__file__).parent) + "/"
_STEPS_BEFORE = 4  # of decode: from then on each step is like the one before


@dataclass
class Trace:
    """files: in order of first touch, relative to src/quire. moves: calls and returns from one file to another."""

    files: list[str] = field(default_factory=list)
    moves: int = 0

    def __str__(self) -> str:
        lines = [f"  {number:3d} {file}" for number, file in enumerate(self.files, start=1)]
        return "\n".join([f"{len(self.files)} files, {self.moves} moves between files", *lines])


def traced(work: Callable[[], Any], driver: Driver | None = None) -> Trace:
    """Runs `work` and records the files that it passes in this thread, and in the driver's."""
    trace, here, lock, begun = Trace(), threading.local(), threading.Lock(), threading.Event()

    def see(frame: FrameType, event: str, _: Any) -> None:
        if not begun.is_set():  # the driver's thread is on its way back from the call that has it traced
            return
        seen: FrameType | None = frame
        if event == "return":
            seen = frame.f_back
        elif event != "call":
            return
        if seen is None or not seen.f_code.co_filename.startswith(_ROOT):
            return
        file = seen.f_code.co_filename.removeprefix(_ROOT)
        last = getattr(here, "file", None)
        if file == last:
            return
        here.file = file
        with lock:
            trace.moves += last is not None
            if file not in trace.files:
                trace.files.append(file)

    if driver is not None:
        driver.call(lambda: sys.setprofile(see))
    sys.setprofile(see)
    begun.set()
    try:
        work()
    finally:
        begun.clear()
        sys.setprofile(None)
        if driver is not None:
            driver.call(lambda: sys.setprofile(None))
    trace.files = [file for file in trace.files if not file.startswith("<")]
    return trace


def traces() -> tuple[Trace, Trace]:
    """(of one decode step, of one `LLM.generate`)."""
    params = SamplingParams(max_tokens=_STEPS_BEFORE + 4, temperature=0, ignore_eos=True)
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    with LLM(kv_memory="8MiB", storage="paged", backend="native") as llm:
        for prompt in prompts:
            llm.engine.submit(prompt, params)
        for _ in range(_STEPS_BEFORE):
            llm.engine.step()
        step = traced(llm.engine.step)
        while llm.engine.has_work:
            llm.engine.step()
        return step, traced(lambda: llm.generate(prompts, params), llm.driver)


def main() -> None:
    step, generate = traces()
    print(f"One decode step: {step}\n\nOne LLM.generate: {generate}")


if __name__ == "__main__":
    main()
