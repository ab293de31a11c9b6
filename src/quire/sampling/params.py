"""`SamplingParams`: the sampling options of one request, immutable.

`None` means "not asked for": `resolved` fills it from the model's generation defaults and then from the
neutral value, so that what the user wrote always wins. Values out of range are refused at construction.

Invariant
    S1  a resolved record has no `None` but in `max_tokens` (as long as the model and the cache allow), `seed`
        (drawn from the engine's), `logprobs` and `prompt_logprobs` (none wanted), `allowed_token_ids` (all) and the
        forms (none).

The model's rules for tokens hold where `min_tokens` and `bad_words` are not asked for: `quire.sampling.model_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from quire.errors import ArgumentError
from quire.sampling.beam_search import EarlyStopping

__all__ = ["SamplingParams"]

_MAX_LOGPROBS = 1024
_MAX_BEAMS = 64
_MAX_PENALTY = 16.0


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for drawing the tokens of one request.

    max_tokens: the most tokens to generate per sequence; 0: the prompt is computed and kept, nothing is generated;
        None: the model's default, else what fits, at most 256.
    min_tokens: an end token, a token of `stop_token_ids` or a stop string ends a sequence only after so many tokens;
        None: no end token before the model's own minimum.
    temperature: 0 is greedy (the most likely token); None: the model's default, else greedy.
    top_p, top_k, min_p: keep the smallest set of tokens of probability top_p (1: all; 0: the most likely token, as
        temperature 0), the top_k most likely (0: all), those with at least min_p times the probability of the most
        likely (0: all).
    repetition_penalty: divides (positive) or multiplies (negative) the logits of tokens in prompt or output.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once / per count.
    stop: strings that end a sequence; the text ends before them; None: the model's own. stop_token_ids: tokens that
        end it.
    include_stop_str_in_output: the text includes the stop string or token that ended it.
    n: sequences per prompt; the prompt is computed once and its blocks are shared. With beams: the best of them.
    beam_width: 1 for none; else a beam search with this many beams, as transformers' `generate(num_beams=...)`: greedy
        only, and a request that streams has one output, at its end. None: the model's default, if temperature is not
        above 0 and max_tokens is not 0, else 1.
    length_penalty: of a beam search: an answer's score is its log probability divided by its length to this power.
        None: the model's default, else 1.
    early_stopping: of a beam search: whether it ends when as many answers have ended as it has beams. False: not while
        a beam of its present length can do better; "never": not while one of the largest length can. None: the model's
        default, else False.
    seed: the same seed gives the same tokens, whatever other requests run, and where another request continues the
        text; None: derived once a request from the engine's seed.
    logprobs: for each token its log probability and those of this many likeliest tokens (of the model's raw
        logits, before penalties and temperature).
    prompt_logprobs: the same for each token of the prompt behind the first. prompt_logprobs_start: tokens of the prompt
        before this position get none, and are not computed again where their K and V are cached.
    ignore_eos: the model's end tokens do not end a sequence (`stop_token_ids` still do).
    logit_bias: token id -> value added to its logit, -inf forbids it.
    allowed_token_ids: the only tokens that may come; None: all.
    bad_words: forbidden words, in the tokens that the tokenizer makes of them with a space before them and without: the
        last of these may not follow the others. Other divisions into tokens are not recognised. None: the model's own.
    shown_token_ids: special tokens that the text contains; others are left out.
    json_schema: the answer is a JSON text of this schema (a dict, or its JSON; {} for any JSON). regex: it matches this
        expression. grammar: it follows this Lark grammar, as llguidance reads them. At most one of the three.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] = ()
    include_stop_str_in_output: bool = False
    n: int = 1
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Iterable[int] | None = None
    bad_words: Iterable[str] | None = None
    shown_token_ids: Iterable[int] = ()
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # frozen; sets normal forms
        _check_int(
            "max_tokens", self.max_tokens, 0, None, optional=True, note=" (0: only the prompt is computed)"
        )
        _check_int("min_tokens", self.min_tokens, 0, None, optional=True)
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise ArgumentError(
                f"expected min_tokens of at most max_tokens {self.max_tokens}, got {self.min_tokens} - in `min_tokens`"
            )
        _check_number("temperature", self.temperature, 0.0, None, "0 (greedy) or more", optional=True)
        _check_number("top_p", self.top_p, 0.0, 1.0, "0 (the most likely token) to 1", optional=True)
        _check_int("top_k", self.top_k, 0, None, optional=True, note=" (0: all tokens)")
        _check_number("min_p", self.min_p, 0.0, 1.0, "0 to 1", optional=True)
        _check_number(
            "repetition_penalty",
            self.repetition_penalty,
            0.0,
            None,
            "more than 0",
            optional=True,
            open_low=True,
        )
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "-2 to 2")
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "-2 to 2")
        _check_int("n", self.n, 1, 1024)
        self._check_beams()
        _check_int("seed", self.seed, 0, 2**63 - 1, optional=True)
        _check_int("logprobs", self.logprobs, 0, _MAX_LOGPROBS, optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, _MAX_LOGPROBS, optional=True)
        _check_int("prompt_logprobs_start", self.prompt_logprobs_start, 0, None)
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise ArgumentError(
                f"expected prompt_logprobs with prompt_logprobs_start {self.prompt_logprobs_start}, got none - in "
                "`prompt_logprobs_start`"
            )
        for name in ("stop", "bad_words"):
            if getattr(self, name) is not None:
                set_field(self, name, _texts(name, getattr(self, name)))
        for name in ("stop_token_ids", "shown_token_ids"):
            set_field(self, name, tuple(_token_id(name, token) for token in getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            allowed = tuple(dict.fromkeys(_token_id("allowed_token_ids", t) for t in self.allowed_token_ids))
            if not allowed:
                raise ArgumentError("expected at least one token id, got none - in `allowed_token_ids`")
            set_field(self, "allowed_token_ids", allowed)
        bias = {_token_id("logit_bias", token): value for token, value in (self.logit_bias or {}).items()}
        for token, value in bias.items():
            if not _is_number(value) or math.isnan(value) or value == math.inf:
                raise ArgumentError(
                    f"expected a number below infinity, got {value!r} - in `logit_bias[{token}]`"
                )
        set_field(self, "logit_bias", bias)
        if self.json_schema is not None and not isinstance(self.json_schema, (str, Mapping)):
            got = type(self.json_schema).__name__
            raise ArgumentError(f"expected a schema as a dict or JSON text, got {got} - in `json_schema`")
        for name in ("regex", "grammar"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ArgumentError(f"expected a string, got {type(value).__name__} - in `{name}`")
        if sum(form is not None for form in self.forms.values()) > 1:
            raise ArgumentError("expected at most one of json_schema, regex and grammar, got several")

    def _check_beams(self) -> None:
        _check_int("beam_width", self.beam_width, 1, _MAX_BEAMS, optional=True)
        _check_number(
            "length_penalty",
            self.length_penalty,
            -_MAX_PENALTY,
            _MAX_PENALTY,
            f"-{_MAX_PENALTY} to {_MAX_PENALTY}",
            optional=True,
        )
        if not isinstance(self.early_stopping, bool) and self.early_stopping not in (None, "never"):
            raise ArgumentError(
                f'expected True, False or "never", got {self.early_stopping!r} - in `early_stopping`'
            )
        if self.beam_width is None:  # checked when resolved
            return
        if self.beam_width > 1:
            if self.n > self.beam_width:
                raise ArgumentError(
                    f"expected n of at most beam_width {self.beam_width}, got {self.n} - in `n`"
                )
            if self.temperature:
                raise ArgumentError(
                    f"expected temperature 0 with beam_width {self.beam_width}, got {self.temperature}: beams are not "
                    "drawn - in `temperature`"
                )
            return
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(self, name) not in (None, neutral):
                raise ArgumentError(
                    f"expected beam_width of at least 2 with {name} {getattr(self, name)!r}, got {self.beam_width} - "
                    f"in `{name}`"
                )

    def num_beams(self, defaults: Mapping[str, Any] | None = None) -> int:
        """The beams of a request, 1 without a search. defaults: as of `resolved`."""
        if self.beam_width is not None:
            return self.beam_width
        if self.temperature or self.max_tokens == 0:
            return 1
        of_model = (defaults or {}).get("num_beams")
        return 1 if of_model is None else of_model

    def resolved(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """These parameters with every gap filled (S1).

        defaults: those of the model's generation_config.json; temperature 0 if the model does not sample. None: greedy.

        *raises:* ArgumentError: they do not go with the defaults.
        """
        defaults = {"temperature": 0.0} if defaults is None else defaults

        def pick(value: Any, name: str, neutral: Any) -> Any:
            if value is not None:
                return value
            given = defaults.get(name)
            return neutral if given is None else given

        max_tokens, min_tokens = pick(self.max_tokens, "max_new_tokens", None), self.min_tokens or 0
        temperature, top_p = pick(self.temperature, "temperature", 1.0), pick(self.top_p, "top_p", 1.0)
        length_penalty, early_stopping = self.length_penalty, self.early_stopping
        if (num_beams := self._beams_of(defaults)) > 1:
            temperature = 0.0
            length_penalty = pick(length_penalty, "length_penalty", 1.0)
            early_stopping = pick(early_stopping, "early_stopping", False)
        if top_p == 0.0:
            temperature, top_p = 0.0, 1.0
        return replace(
            self,
            beam_width=num_beams,
            length_penalty=1.0 if length_penalty is None else length_penalty,
            early_stopping=early_stopping or False,
            max_tokens=None if max_tokens is None else max(max_tokens, min_tokens),
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=pick(self.top_k, "top_k", 0),
            min_p=pick(self.min_p, "min_p", 0.0),
            repetition_penalty=pick(self.repetition_penalty, "repetition_penalty", 1.0),
            stop=pick(self.stop, "stop_strings", ()),
            bad_words=self.bad_words or (),
        )

    def _beams_of(self, defaults: Mapping[str, Any]) -> int:
        """`num_beams`, checked. *raises:* ArgumentError."""
        num_beams = self.num_beams(defaults)
        _check_int("num_beams", num_beams, 1, _MAX_BEAMS)
        if self.beam_width is None and 1 < num_beams < self.n:
            raise ArgumentError(
                f"expected n of at most {num_beams}, num_beams of the model's generation config, got {self.n}; set "
                "beam_width, 1 for no beam search - in `n`"
            )
        return num_beams

    @property
    def is_plain_greedy(self) -> bool:
        """True if the next token is the largest raw logit. Only of resolved parameters."""
        return self.temperature == 0.0 and not self.changes_logits

    @property
    def forms(self) -> dict[str, Any]:
        """The forms of structured answers, by name."""
        return {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}

    @property
    def masks_tokens(self) -> bool:
        """True if tokens are forbidden in another way than by grammar or bias."""
        return self.allowed_token_ids is not None or bool(self.bad_words) or bool(self.min_tokens)

    @property
    def changes_logits(self) -> bool:
        """True if the logits are changed before temperature. Only of resolved parameters."""
        return bool(
            self.logit_bias
            or self.masks_tokens
            or any(form is not None for form in self.forms.values())
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty not in (None, 1.0)
        )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _texts(name: str, value: str | Iterable[Any]) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ArgumentError(f"expected non-empty strings, got {text!r} - in `{name}`")
    return texts


def _token_id(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 0:
        raise ArgumentError(f"expected token ids of 0 or more, got {value!r} - in `{name}`")
    return int(value)


def _check_int(
    name: str, value: Any, low: int, high: int | None, *, optional: bool = False, note: str = ""
) -> None:
    if value is None and optional:
        return
    allowed = f"{low} or more" if high is None else f"{low} to {high}"
    is_int = hasattr(value, "__index__") and not isinstance(value, bool)
    if value is None or not is_int or value < low or (high is not None and value > high):
        raise ArgumentError(f"expected an integer of {allowed}{note}, got {value!r} - in `{name}`")


def _check_number(
    name: str,
    value: Any,
    low: float,
    high: float | None,
    allowed: str,
    *,
    optional: bool = False,
    open_low: bool = False,
) -> None:
    if value is None and optional:
        return
    good = _is_number(value) and math.isfinite(value) and value >= low and not (open_low and value == low)
    if not good or (high is not None and float(value or 0) > high):
        raise ArgumentError(f"expected a number of {allowed}, got {value!r} - in `{name}`")
