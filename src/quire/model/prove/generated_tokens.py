"""Last proof before a model serves: `generate`, as a user calls it, must give what the model's forward gives.

The probe gives the forward its positions as the engine does. A model's `generate` may prepare other positions, a mask
or more (Kosmos 2.5 counts positions from behind its padding id): then the engine would exactly compute the wrong thing.

Cost: a prompt of eight tokens and two more, by `generate`; twice if 16 bits leave it open.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig

from quire.errors import UnsupportedModelError
from quire.model.prove.model_probe import Probe
from quire.model.prove.upcast import upcast_to
from quire.weights.generation_config import OBEYED, REFUSED
from quire.weights.load import LoadedModel

__all__ = ["check_generate"]

_NUM_STEPS = 3


def check_generate(loaded: LoadedModel, probe: Probe) -> None:
    """Return if `generate` gives the logits of the model's own forward, or cannot be called with tokens alone.

    Raises:
        UnsupportedModelError: it gives other logits.
    """
    tokens = probe.sequences[0]
    got = _generated(loaded, tokens)
    if got is None:
        return
    rows = slice(len(tokens) - 1 - len(got), len(tokens) - 1)
    agree, distance, _ = probe.compare(got, rows)
    if not agree and loaded.dtype in (torch.bfloat16, torch.float16):
        # A step with a cache may round more than a forward of all tokens; in float32 both are the same.
        with upcast_to(loaded.model, torch.float32):
            wide = _generated(loaded, tokens)
        agree = wide is not None and probe.is_wider(wide, rows)
    if not agree:
        raise UnsupportedModelError(
            f"model type {loaded.model_type}: expected generate to give the logits of a forward with "
            f"position_ids 0, 1, 2, ..., got others (relative distance {distance:.3g}): it prepares inputs of its own"
        )


def _generated(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor | None:
    """Logits [_NUM_STEPS, vocab_size] from which `generate` would choose the last tokens.

    The tokens are forced, so the rules of the model's generation config are switched off for this call.
    """
    model: Any = loaded.model
    own = model.generation_config
    model.generation_config = copy.deepcopy(own)
    for name in OBEYED.union(REFUSED) if own is not None else ():
        setattr(model.generation_config, name, None)
    prompt = tokens[None, : len(tokens) - _NUM_STEPS].to(model.device)
    options = GenerationConfig(
        max_new_tokens=_NUM_STEPS, do_sample=False, num_beams=1, use_cache=True, eos_token_id=None, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    try:
        with torch.inference_mode():
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=options,
                prefix_allowed_tokens_fn=lambda _, ids: [int(tokens[len(ids)])],
            )
    except Exception:  # it needs images, or has no such loop: then there is nothing to compare
        return None
    finally:
        model.generation_config = own
    logits = torch.cat(output.logits).cpu()
    return logits if torch.equal(output.sequences[0].cpu(), tokens) else None
