"""Importing and using Quire changes no state of the host process: compared before and after, in a process of its
own."""

from __future__ import annotations

import os

import pytest
from support.forked_program import run_program

_PROGRAM = """
import gc, locale, logging, os, random, signal, sys, threading, warnings

import numpy as np
import torch
import transformers
from huggingface_hub.utils import are_progress_bars_disabled, logging as hub_logging
from transformers import AutoTokenizer, Qwen3ForCausalLM  # what they change themselves comes before the first look
from transformers.utils import import_utils

torch.set_num_threads(2)


def torch_threads_of_a_new_thread():
    counts = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return counts[0]


def functions(module):
    return {name: id(value) for name, value in vars(module).items() if callable(value)}


def look():
    loggers = [logging.getLogger(), logging.getLogger("transformers"), logging.getLogger("huggingface_hub")]
    return {
        "meta_path": [id(finder) for finder in sys.meta_path],
        "path_hooks": [id(hook) for hook in sys.path_hooks],
        "modules": {name: id(module) for name, module in sys.modules.items()},
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)),
        "threads": (torch.get_num_threads(), torch_threads_of_a_new_thread(), torch.get_num_interop_threads()),
        "dtype": (torch.get_default_dtype(), str(torch.get_default_device())),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "flags": (
            torch.backends.mkldnn.enabled,
            torch.backends.mkldnn.deterministic,
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        ),
        "import_utils": functions(import_utils),
        "torch": functions(torch),
        "functional": functions(torch.nn.functional),
        "module": functions(torch.nn.Module),
        "loggers": [(a.level, a.disabled, a.propagate, [id(b) for b in a.handlers], a.filters[:]) for a in loggers],
        "verbosity": (transformers.utils.logging.get_verbosity(), hub_logging.get_verbosity()),
        "bars": (transformers.utils.logging.is_progress_bar_enabled(), are_progress_bars_disabled()),
        "warnings": (list(warnings.filters), id(warnings.showwarning)),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environ": dict(os.environ),
        "path": list(sys.path),
        "cwd": os.getcwd(),
        "umask": [line for line in open("/proc/self/status") if line.startswith("Umask")],
        "nice": os.nice(0),
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch_random": torch.get_rng_state().tolist(),
        "locale": locale.setlocale(locale.LC_ALL),
        "hooks": [id(hook) for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval()),
    }


def compare(when, before, after):
    for name in before:
        was, now = before[name], after[name]
        if isinstance(was, dict) and name != "environ" and name != "signals":  # more may have been imported
            now = {key: now.get(key) for key in was}
            was, now = ({key: x[key] for key in was if was[key] != now[key]} for x in (was, now))
        assert was == now, f"{when}: {name} was {was!r:.500}, is {now!r:.500}"


before = look()
import quire
compare("import quire", before, look())
from quire import LLM, SamplingParams
compare("from quire import LLM", before, look())
during = []
tokenizer_of = AutoTokenizer.from_pretrained
AutoTokenizer.from_pretrained = lambda *args, **options: during.append(look()) or tokenizer_of(*args, **options)
llm = LLM(kv_memory="8MiB")
AutoTokenizer.from_pretrained = tokenizer_of
compare("during a load", before, *during)
compare("LLM(...)", before, look())
llm.generate(["def f(x):", "import os"], SamplingParams(max_tokens=4, temperature=0.8))
compare("generate", before, look())
llm.close()
compare("close", before, look())
print("same")
"""


_THREADS = """
import threading
import time

import torch

torch.set_num_threads(2)

from quire import LLM, SamplingParams
from quire.hf import QuireCache, accelerate

def count():
    torch.ones(300, 300) @ torch.ones(300, 300)
    return torch.get_num_threads()


def threads_started_during(call):
    # The call is told when the last thread has begun, and ends then.
    at_first, at_last, over, begun = [], [], threading.Event(), threading.Event()

    def host():
        at_first.append(count())
        over.wait()
        at_last.append(count())

    threads = [threading.Thread(target=host, daemon=True) for _ in range(60)]
    done = threading.Event()
    caller = threading.Thread(target=lambda: (call(begun.is_set), done.set()), daemon=True)
    caller.start()
    for thread in threads:
        time.sleep(0.001)
        thread.start()
    while len(at_first) < len(threads):
        time.sleep(0.001)
    assert not done.is_set(), "the call was over before the last thread began"
    begun.set()
    caller.join()
    assert done.is_set()
    over.set()
    for thread in threads:
        thread.join()
    assert at_first == at_last == [2] * 60, (at_first, at_last)
    assert count() == 2


params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
with LLM(num_threads=1, max_model_len=1024, kv_memory="64MiB") as llm:


    def streams(is_over):
        some = [llm.stream([1, 2, 3], params) for _ in range(4)]
        while not is_over():
            for stream in some:
                next(stream)
        for stream in some:
            stream.close()

    threads_started_during(streams)
from transformers import AutoModelForCausalLM
from quire.model.cache_keyword import cache_keyword
from quire.weights.load import EMBEDDED

model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
accelerate(model)
options = {"max_new_tokens": 600, "eos_token_id": None, "do_sample": False}
threads_started_during(
    lambda is_over: model.generate(
        torch.tensor([[1, 2, 3]]),
        **{cache_keyword(model.forward): QuireCache(model.config)},
        stopping_criteria=[lambda ids, scores, **_: torch.full((len(ids),), is_over())],
        **options,
    )
)
print("same")
"""


@pytest.mark.parametrize("program", [_PROGRAM, _THREADS], ids=["state", "threads"])
def test_nothing_of_the_host_changes(program: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_HUB_")}
    done = run_program(program, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same\n"
