"""A model's generation config, field by field: obeyed, without effect here, or refused by name.

The fields of generation_config.json (of config.json if there is none) that `generate` obeys become the default of every
request: `sampling_defaults`. Its rules for tokens are those of `quire.sampling.model_rules`.

Invariant
    G1  every field of transformers' GenerationConfig is in exactly one of OBEYED, NO_EFFECT and REFUSED. A field that
        a later transformers adds is refused if it is set.

Cost: O(fields).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig

from quire.errors import UnsupportedModelError

__all__ = ["GREEDY", "NO_EFFECT", "OBEYED", "REFUSED", "sampling_defaults"]

GREEDY = {"temperature": 0.0}  # for a model without a generation config, or with one that is not read
_log = logging.getLogger("quire")

_DRAWING = ("temperature", "top_p", "top_k", "min_p")  # only for a model that samples
OBEYED = frozenset(
    (
        *_DRAWING,
        "do_sample", "eos_token_id", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings",
        "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
        "sequence_bias", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
        "forced_eos_token_id", "exponential_decay_length_penalty", "num_beams", "length_penalty", "early_stopping",
    )
)  # fmt: skip

_DRAFTS = "drafts change no token"
_RUNNING = "how transformers runs the model; the answer does not change"
_OUTPUT = "further outputs of `generate`, next to the tokens"
NO_EFFECT = {
    **dict.fromkeys(
        ("use_mtp", "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "speculation_type",
         "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
         "assistant_lookbehind", "target_lookbehind"),
        _DRAFTS,
    ),
    **dict.fromkeys(
        ("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory", "compile_config",
         "disable_compile", "continuous_batching_config"),
        _RUNNING,
    ),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        _OUTPUT,
    ),
    "diversity_penalty": "of groups of beams",
    "num_return_sequences": "a request's `n` says how many answers it gets",
    "renormalize_logits": "adds one number to all logits",
    "remove_invalid_values": "finite logits are unchanged; others end their request with an error",
    "pad_token_id": "no prompt is padded",
    "bos_token_id": "a prompt has exactly its given tokens",
    "decoder_start_token_id": "of an encoder-decoder model",
    "transformers_version": "the version that wrote the file",
}  # fmt: skip


def _is_on(value: Any, _: GenerationConfig) -> bool:
    return bool(value)


def _samples(neutral: float) -> Callable[[Any, GenerationConfig], bool]:
    return lambda value, config: bool(config.do_sample) and value != neutral


# By field: (whether a value other than None has an effect, the name of the effect that Quire lacks).
REFUSED: dict[str, tuple[Callable[[Any, GenerationConfig], bool], str]] = {
    "num_beam_groups": (
        lambda value, config: value != 1 and (config.num_beams or 1) != 1,
        "a search in groups of beams",
    ),
    "constraints": (_is_on, "constrained beam search"),
    "force_words_ids": (_is_on, "constrained beam search"),
    "penalty_alpha": (lambda value, config: value > 0 and not config.do_sample, "contrastive search"),
    "dola_layers": (_is_on, "decoding by contrasting layers"),
    "guidance_scale": (lambda value, _: value != 1, "classifier-free guidance"),
    "watermarking_config": (_is_on, "watermarking"),
    "token_healing": (_is_on, "token healing"),
    "max_time": (lambda value, _: True, "a time limit"),
    "is_assistant": (_is_on, "an end by the confidence of a drafting model"),
    "assistant_ensemble_weight": (lambda value, _: True, "a mixture with a drafting model"),
    "cache_implementation": (
        lambda value, _: value == "quantized",
        "a cache that transformers quantizes (`kv_dtype` has Quire's own)",
    ),
    "top_h": (_samples(1.0), "top_h"),
    "typical_p": (_samples(1.0), "typical_p"),
    "epsilon_cutoff": (_samples(0.0), "epsilon_cutoff"),
    "eta_cutoff": (_samples(0.0), "eta_cutoff"),
}


def sampling_defaults(config: GenerationConfig | None, model_type: str, tokenizer: Any) -> dict[str, Any]:
    """The values of the obeyed fields without those at None; temperature 0 for a model that does not sample.

    *raises:* UnsupportedModelError: a field has an effect that Quire lacks.
    """
    if config is None:
        return dict(GREEDY)
    known = vars(GenerationConfig())
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, value in fields.items():
        if value is None or name in OBEYED or name in NO_EFFECT:
            continue
        if name in REFUSED:
            has_effect, effect = REFUSED[name]
            if has_effect(value, config):
                _refuse(model_type, name, value, f"Quire does not do {effect}")
        elif name in known:
            _refuse(model_type, name, value, "Quire does not know the field")
        else:
            _log.debug(
                "model type %s: `generate` does not know the field %s of its generation config",
                model_type,
                name,
            )
    if config.do_sample and (num_beams := fields.get("num_beams")) not in (None, 1):
        _refuse(model_type, "num_beams", num_beams, "Quire does not draw beams (do_sample)")
    if fields.get("stop_strings") and tokenizer is None:
        _refuse(model_type, "stop_strings", fields["stop_strings"], "there is no tokenizer")
    defaults = {
        name: value
        for name in OBEYED - {"do_sample", "eos_token_id"}
        if (value := fields.get(name)) is not None
    }
    if not config.do_sample:
        for name in _DRAWING:
            defaults.pop(name, None)
        defaults |= GREEDY
    return defaults


def _refuse(model_type: str, name: str, value: Any, reason: str) -> None:
    raise UnsupportedModelError(
        f"model type {model_type}: its generation config has {name}={value!r}, and {reason}; take the field out of "
        "generation_config.json, or start with generation_config='none', which leaves the file's defaults and rules out"
    )
