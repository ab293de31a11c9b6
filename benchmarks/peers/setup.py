"""Sets the peers up: a virtual environment for each, with exact versions, and the model in each one's format.

    python benchmarks/peers/setup.py [NAME ...] [--peers DIR] [--jobs N] [--kind dense|lfm2|granite4|qwen3.5]
                                     [--vocabulary cut|real]

NAME: openvino, vllm, llama_cpp, llama_cpp_no_amx, transformers; all that run models of the kind if none is given.
DIR (build/peers): about 10 GB. llama.cpp is compiled for this processor, as a library and as llama-server, which takes
a quarter of an hour of a C++ compiler on two cores, and again without AMX. pip has to find `torch==2.13.0+cpu`: where
it is on no index that pip knows, name PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL.

--kind: of the model (`shape.py`). Each has its own folder, 3 GB for a hybrid, in 16 bits only; minutes each.

May be run again: an environment that fits its requirements is left alone, and so is its model. Prints failures,
with the log, and goes on with the others; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

from shape import KINDS, shape_of, write

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Environment:
    """
    Args:
        converter: script that turns the model of transformers into `model`; None if the engine reads that.
        rounded: dense models of fewer bits: name, source, and the converter's argument.
        kinds: of models that it runs here (`shape.KINDS`).
        overlay: of the kinds there, a file of requirements that its converter needs instead.
        file: of its requirements, where that is another one's.
        pip_options, variables: of its installation.
    """

    name: str
    model: str = "hf"
    converter: str | None = None
    rounded: tuple[tuple[str, str, str], ...] = ()
    kinds: tuple[str, ...] = ("dense",)
    overlay: dict[str, str] = field(default_factory=dict)
    file: str | None = None
    pip_options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def requirements(self) -> Path:
        return HERE / "requirements" / f"{self.file or self.name}.txt"


_LLAMA_CPP = (
    "-DGGML_OPENMP=ON -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF "
    "-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF"
)
ENVIRONMENTS = [
    Environment(
        "openvino",
        model="openvino",
        converter="openvino_convert.py",
        rounded=(("openvino-int4", "hf", "4"), ("openvino-int8", "hf", "8")),
        kinds=KINDS,
        overlay={"lfm2": "openvino_export", "qwen3.5": "openvino_export"},
    ),
    Environment("vllm"),
    Environment(
        "llama_cpp",
        model="model.gguf",
        converter="gguf_convert.py",
        rounded=tuple((f"model-{kind}.gguf", "model.gguf", kind) for kind in ("Q4_0", "Q4_K_M", "Q8_0")),
        kinds=KINDS,
        pip_options=("--no-binary", "llama-cpp-python"),
        variables={"CMAKE_ARGS": f"-DGGML_NATIVE=ON {_LLAMA_CPP}"},
    ),
    # Of its quantized products with AMX this version ends the process (build 11434); repacked for AVX-512 they run.
    Environment(
        "llama_cpp_no_amx",
        file="llama_cpp",
        pip_options=("--no-binary", "llama-cpp-python", "--no-cache-dir"),
        variables={
            "CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_BMI2=ON -DGGML_FMA=ON "
            "-DGGML_F16C=ON -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON "
            f"{_LLAMA_CPP}"
        },
    ),
    Environment("transformers", kinds=KINDS),
]


class SetupError(Exception):
    """A command failed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [environment.name for environment in ENVIRONMENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--peers", type=Path, default=HERE.parents[1] / "build" / "peers")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="of the compiler")
    parser.add_argument("--kind", choices=KINDS, default="dense", help="of model")
    parser.add_argument("--vocabulary", choices=("cut", "real"), default="cut")
    arguments = parser.parse_args()
    if arguments.kind != "dense" and arguments.vocabulary != "cut":
        parser.error(f"--vocabulary is of the dense model, got --kind {arguments.kind}")
    if unknown := set(arguments.names) - set(names):
        parser.error(f"expected names among {', '.join(names)}, got {', '.join(sorted(unknown))}")
    peers: Path = arguments.peers.resolve()
    (peers / "logs").mkdir(parents=True, exist_ok=True)
    print("the model, with random weights", flush=True)
    shape = shape_of(arguments.kind, arguments.vocabulary)
    write(shape, peers / shape.folder / "hf")
    failures = []
    for environment in ENVIRONMENTS:
        if (
            environment.name not in arguments.names
            if arguments.names
            else arguments.kind not in environment.kinds
        ):
            continue
        try:
            is_new = install(environment, peers, arguments.jobs)
            if arguments.kind in environment.kinds:
                convert(environment, peers, peers / shape.folder, arguments.kind, again=is_new)
        except (SetupError, OSError) as error:
            failures.append(environment.name)
            print(f"FAILED {environment.name}: {error}", flush=True)
    return 1 if failures else 0


def install(environment: Environment, peers: Path, jobs: int) -> bool:
    """Whether there was something to install."""
    home = peers / environment.name
    installed = home / "installed"  # a copy of the requirements that it has
    if installed.exists() and installed.read_text() == environment.requirements.read_text():
        return False
    print(f"{environment.name}: installing", flush=True)
    if not (home / "bin" / "python").exists():
        venv.create(home, with_pip=True)
    command = [home / "bin" / "python", "-m", "pip", "install", "--no-deps", *environment.pip_options]
    jobs_of = dict.fromkeys(["CMAKE_BUILD_PARALLEL_LEVEL", "LLAMA_CPP_BUILD_JOBS"], str(jobs))
    variables = {**environment.variables, **jobs_of}
    run(
        [*command, "-r", environment.requirements],
        peers / "logs" / f"install-{environment.name}.log",
        variables,
    )
    installed.write_text(environment.requirements.read_text())
    return True


def convert(environment: Environment, peers: Path, models: Path, kind: str, *, again: bool) -> None:
    """Its model of 16 bits, then, of the dense one, those made of it or of transformers' one."""
    if environment.converter is None:
        return
    python, converter = peers / environment.name / "bin" / "python", HERE / environment.converter
    rounded = environment.rounded if kind == "dense" else ()
    for name, source, *argument in ((environment.model, "hf"), *rounded):
        target = models / name
        done = target / "complete" if target.suffix == "" else target
        if done.exists() and not again:
            continue
        print(f"{environment.name}: converting the model to {target.relative_to(peers)}", flush=True)
        log = peers / "logs" / f"convert-{models.name}-{target.stem}.log"
        variables = {"HF_HUB_OFFLINE": "1"}
        if kind in environment.overlay:
            variables["PYTHONPATH"] = str(lay_over(environment.overlay[kind], python, peers))
        run([python, converter, models / source, target, *argument], log, variables)


def lay_over(file: str, python: Path, peers: Path) -> Path:
    """A folder with these requirements, which an environment finds before its own ones."""
    requirements, target = HERE / "requirements" / f"{file}.txt", peers / file
    installed = target / "installed"
    if not installed.exists() or installed.read_text() != requirements.read_text():
        shutil.rmtree(target, ignore_errors=True)
        log = peers / "logs" / f"install-{file}.log"
        run([python, "-m", "pip", "install", "--no-deps", "--target", target, "-r", requirements], log, {})
        installed.write_text(requirements.read_text())
    return target


def run(command: list[str | Path], log: Path, variables: dict[str, str]) -> None:
    """*raises:* SetupError with the end of its log."""
    with log.open("w") as file:
        status = subprocess.run(command, stdout=file, stderr=file, env={**os.environ, **variables}).returncode
    if status != 0:
        lines = log.read_text(errors="replace").splitlines()
        raise SetupError(
            "\n".join([f"status {status} of {' '.join(map(str, command))}; see {log}", *lines[-8:]])
        )


if __name__ == "__main__":
    sys.exit(main())
