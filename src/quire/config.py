"""`EngineConfig`: every option of an engine, in one class, checked before anything is loaded.

One field of it is

    a keyword of `quire.LLM` and `quire.AsyncEngine`
    a flag of the commands that open an engine (`quire.cli.options`)
    a key of the [model] table of a server's file (`quire.server.settings`)
    an input of the KV budget (`quire.engine.open_storage`, `quire.engine.kv_budget`)

so that a new option takes one field. The code that uses an option documents its effect, and checks it against the
machine and the model (is so much memory free, does a token fit into a piece).

Invariants
    O1  the options of a config have the right type and are within their range; none is without effect next to the
        others.
    O2  making a config reads no file, makes no folder and imports neither torch nor transformers.
    O3  any fault is one ArgumentError that names the option.

Cost: some 20 us for each config.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, field, fields, replace
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, get_type_hints

from pydantic import BeforeValidator, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from quire.errors import ArgumentError
from quire.peer_address import PeerAddress
from quire.registry import Registry
from quire.secret_text import resolve_secret
from quire.sizes import parse_budget, parse_share, parse_size
from quire.spec.kv_dtype import kv_dtype_text
from quire.spec.kv_formats import element_formats
from quire.spec.weight_formats import WeightFormats, parse_rounding, parse_weights

__all__ = [
    "COMPARED_OPTIONS",
    "MAX_STEP_DRAFTS",
    "OPTION_OF_STORAGE",
    "PROPOSERS",
    "REGISTERED_PROPOSERS",
    "REGISTERED_STORAGES",
    "STORAGES",
    "EngineConfig",
    "IntegerRange",
    "Option",
    "check_secret",
    "check_weight",
    "draft_model_of",
    "parse_speculation",
    "secret_bytes",
    "shows_options",
    "spelled_out",
    "takes_options",
    "with_flags",
]

STORAGES = ("paged", "contiguous", "growing", "virtual")

# The option that may follow a storage's name in one string: "paged:32".
OPTION_OF_STORAGE = {"paged": "block_size", "virtual": "piece_size"}

# Options of `quire compare` (`quire.simulate.compared_storage`); an engine's storage has their defaults.
COMPARED_OPTIONS = {"contiguous": "reservation", "growing": "growth"}

# Proposers of drafts of Quire's own, and those added by `quire.sampling.proposers.proposer.register`.
PROPOSERS = ("ngram", "suffix")
REGISTERED_PROPOSERS: Registry[bool] = Registry("a proposer", "speculation", {})
_DRAFTS, _MODEL_DRAFTS = 8, 4  # of a step and sequence, if the option has no number
_MAX_DRAFTS = 32
MAX_STEP_DRAFTS = 64  # of all sequences of a step

# Storages added by `quire.engine.open_storage.register`: whether sequences can share their blocks.
REGISTERED_STORAGES: Registry[bool] = Registry("a storage", "storage", {})

_SHARING = ("paged", "virtual", "auto")  # storages whose sequences can share blocks
_TIERS = ("host_cache", "disk_cache", "peers", "remote_cache")
_LEAST_SECRET = 16  # bytes
_IDLE_TRIM_S = 60.0
_DEVICE_NAME = re.compile(r"[a-z]+(:[0-9]+)?")

Parameters = ParamSpec("Parameters")
Made = TypeVar("Made", bound=type)
Method = TypeVar("Method", bound=Callable[..., None])


@plain_dataclass(frozen=True)
class Option:
    """The documentation of a field of `EngineConfig`.

    storages: storages that use the option; empty: all. short: a second name of its flag. is_secret: the option is
    neither a flag nor a key of [model], and not shown. may_hide: the value may contain a secret, and is not shown.
    """

    metavar: str | None
    help: str
    storages: tuple[str, ...] = ()
    short: str | None = None
    is_secret: bool = False
    may_hide: bool = False


def option(default: Any, *arguments: Any, **keywords: Any) -> Any:
    """A field of `EngineConfig`: its default, and the arguments of `Option`."""
    made = Option(*arguments, **keywords)
    return field(default=default, repr=not (made.is_secret or made.may_hide), metadata={"option": made})


# -- checks of values; the type says whether None may be -------------------------------------------------


def _checked(check: Callable[[str, Any], Any]) -> BeforeValidator:
    """check: called with the option's name and a value; raises ArgumentError."""

    def run(value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            check(str(info.field_name), value)
        return value

    return BeforeValidator(run)


@plain_dataclass(frozen=True)
class IntegerRange:
    """The check of an integer option: a whole number of low to high."""

    low: int
    high: int

    def __call__(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, bool) or not hasattr(value, "__index__") or not self.low <= value <= self.high:
            raise ArgumentError(f"expected an integer of {self.low} to {self.high}, got {value!r}")
        return operator.index(value)


def _integer(low: int, high: int) -> BeforeValidator:
    return BeforeValidator(IntegerRange(low, high))


def _seconds() -> BeforeValidator:
    def run(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ArgumentError(f"expected seconds, 0 or more, got {value!r}")
        return float(value)

    return BeforeValidator(run)


def _storage(name: str, value: Any) -> None:
    names = (*STORAGES, *REGISTERED_STORAGES)
    if value not in (*names, "auto"):
        raise ArgumentError(f"expected {', '.join(names)} or auto, got {value!r}")


def _kv_memory(name: str, value: Any) -> None:
    parse_budget(value, where=f"{name}, which may also be a share such as 40% or auto")


def _size_or_auto(name: str, value: Any) -> None:
    if value != "auto":
        parse_size(value, where=f"{name}, which may also be auto")


def _share(name: str, value: Any) -> None:
    parse_share(name, value, 1)


def _device(name: str, value: Any) -> None:
    if not isinstance(value, str) or not _DEVICE_NAME.fullmatch(value):
        raise ArgumentError(
            f"expected a device of torch, such as cpu, cuda or cuda:1, got {value!r} - in `{name}`"
        )


def _folder(name: str, value: Any) -> None:
    # An empty name, as of an unset variable, would be the current folder.
    if not isinstance(value, str | os.PathLike) or not str(os.fspath(value)).strip():
        raise ArgumentError(f"expected a folder, got {value!r}")


def _auto_off_or_folder(value: Any) -> Any:
    if not isinstance(value, str | os.PathLike) or not str(os.fspath(value)).strip():
        raise ArgumentError(f"expected auto, off or a folder, got {value!r}")
    return value


def _url(name: str, value: Any) -> None:
    if isinstance(value, str):
        resolve_secret(value, f"`{name}`")


def _peer_address(name: str, value: Any) -> None:
    if isinstance(value, str):
        PeerAddress.parse(value)


def _peer_addresses(name: str, value: Any) -> None:
    if isinstance(value, str):
        parse_peers(value)


def parse_peers(text: str) -> list[PeerAddress]:
    """The addresses of `peers`. *raises:* ArgumentError."""
    return [PeerAddress.parse(part.strip()) for part in text.split(",")]


def parse_speculation(text: Any) -> tuple[str, int] | None:
    """(proposer, drafts of a step and sequence) of `speculation`; None for off, and "auto" is a proposer here.

    *raises:* ArgumentError: no such proposer, or number.
    """
    names = ("off", "auto", *PROPOSERS, *REGISTERED_PROPOSERS)
    name, colon, number = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name == "mtp":
        raise ArgumentError(
            f"expected a proposer that this version has, got {text!r}: the heads of a checkpoint for several "
            f"tokens are not loaded; use {' or '.join(PROPOSERS)}, or model:PATH - in `speculation`"
        )
    if name == "model":
        if draft_model_of(text) is None:
            raise ArgumentError(
                f"expected model:PATH or model:PATH:K with K of 1 to {_MAX_DRAFTS}, got {text!r} - in `speculation`"
            )
        number = number.rpartition(":")[2]
        return name, int(number) if number.isdecimal() else _MODEL_DRAFTS
    takes_number = name not in ("off", "auto")
    is_number = number.isdecimal() and 1 <= int(number) <= _MAX_DRAFTS
    if name not in names or (colon and not (takes_number and is_number)):
        raise ArgumentError(
            f"expected {', '.join(names)}, model:PATH, or a proposer with its most drafts a step, 1 to {_MAX_DRAFTS}, "
            f"such as {PROPOSERS[0]}:8, got {text!r} - in `speculation`"
        )
    return None if name == "off" else (name, int(number) if colon else _DRAFTS)


def draft_model_of(text: str) -> str | None:
    """PATH of `speculation="model:PATH:K"`; None for another proposer, without a path, or with another K."""
    name, _, rest = text.partition(":")
    path, colon, number = rest.rpartition(":")
    if not (colon and number.isdecimal()):
        path, number = rest, "1"
    return path if name == "model" and path and 1 <= int(number) <= _MAX_DRAFTS else None


def check_weight(weight: Any, where: str) -> None:
    """*raises:* ArgumentError: not a number of 0.001 to 1000."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0.001 <= weight <= 1000:
        raise ArgumentError(f"expected a weight of 0.001 to 1000, got {weight!r} - {where}")


def check_secret(secret: Any, name: str = "tenant_secret") -> None:
    """*raises:* ArgumentError: the value is no secret; the error does not show it."""
    if secret is not None and not (isinstance(secret, bytes) and len(secret) >= _LEAST_SECRET):
        got = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
        raise ArgumentError(
            f"expected at least {_LEAST_SECRET} bytes, got {got} - in `{name}`; secrets.token_bytes makes some"
        )


def secret_bytes(secret: str | bytes) -> bytes:
    """The bytes of a secret that may be text."""
    return secret.encode(errors="surrogatepass") if isinstance(secret, str) else secret


def _check_secret_or_text(name: str, value: Any) -> None:
    check_secret(secret_bytes(value) if isinstance(value, str) else value, name)


def _dtype(value: Any) -> str:
    """*raises:* ArgumentError: no registered format of keys and values."""
    *others, last = ("auto", *element_formats())
    if (name := str(value).removeprefix("torch.")) not in (*others, last):
        raise ArgumentError(f"expected {', '.join(others)} or {last}, got {name!r} - in `dtype`")
    return name


def _kv_dtype(value: Any) -> str:
    return kv_dtype_text(value if isinstance(value, Mapping) else str(value))


_Size = Annotated[str | int, _checked(lambda name, value: parse_size(value, where=name))]
_Folder = Annotated[str | os.PathLike[str], _checked(_folder)]
_DType = Annotated[str, BeforeValidator(_dtype)]
_KVDType = Annotated[str | Mapping[str | int, str], BeforeValidator(_kv_dtype)]


# -- signatures and errors -------------------------------------------------------------------------------


def _parameters(config: type) -> list[inspect.Parameter]:
    hints = get_type_hints(config)
    keyword, both = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [
        inspect.Parameter(
            entry.name,
            keyword if entry.kw_only else both,
            default=entry.default,
            annotation=hints[entry.name],
        )
        for entry in fields(config)
    ]


def _argument_error(error: ValidationError, config: Any) -> ArgumentError:
    """The first fault, as: expected, got, where."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    cause = first.get("ctx", {}).get("error")
    if first["type"] == "unexpected_keyword_argument":
        return ArgumentError(f"expected only {', '.join(sorted(config.options()))}, got {name}")
    if first["type"] == "unexpected_positional_argument":
        return ArgumentError(f"expected a model and options by name, got {first['input']!r} behind the model")
    if isinstance(cause, ArgumentError):
        text = str(cause)
    else:
        expected = first["msg"].removeprefix("Input should be ").replace("'", "")
        expected = expected.replace("a valid integer", "an integer").replace("a valid ", "a ")
        text = f"expected {expected}, got {first['input']!r}"
    return ArgumentError(text if not name or " - in `" in text else f"{text} - in `{name}`")


def _with_argument_errors(config: Made) -> Made:
    """Turns pydantic's errors into ArgumentErrors, and gives `help` and editors a signature with plain types."""
    checked = config.__init__

    @functools.wraps(checked)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        try:
            checked(self, *arguments, **options)
        except ValidationError as error:
            raise _argument_error(error, config) from None

    config.__init__ = init
    config.__signature__ = inspect.Signature(_parameters(config))  # pyright: ignore[reportAttributeAccessIssue]
    return config


# -- the options ------------------------------------------------------------------------------------


@_with_argument_errors
@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class EngineConfig:
    """Options of an engine: keywords of `LLM`, flags and keys of a file. `EngineConfig.options()` documents each.

    One string may hold a storage and its option: storage="paged:32" is storage="paged", block_size=32, and
    "virtual:256KiB" is storage="virtual", piece_size="256KiB". `storage` is the name alone afterwards. An option that
    modifies another one is refused if that one is not set; an option with its default value counts as not set.

    *raises:* ArgumentError: expected, got, and the option's name.
    """

    model: Any = option(
        None, "M", "The model: a folder, a GGUF file or a Hub id. Default: the embedded model.", short="-m"
    )
    _: KW_ONLY
    kv_memory: Annotated[str | int, _checked(_kv_memory)] = option(
        "auto",
        "SIZE",
        'Memory for keys and values: a size such as "1GiB", a share of the free memory such as "40%", or auto. '
        "Default: auto, at most half of the free memory.",
    )
    storage: Annotated[str, _checked(_storage)] = option(
        "paged",
        "S",
        "Storage of keys and values: paged, contiguous, growing, virtual or auto (virtual if the machine can), with "
        "its option if wanted: paged:32, virtual:256KiB. Default: paged.",
    )
    piece_size: _Size = option(
        "64KiB",
        "SIZE",
        "Bytes of a layer's keys or values that storage virtual maps together, 4KiB to 2MiB. Default: 64KiB.",
        storages=("virtual", "auto"),
    )
    block_size: Annotated[int, _integer(1, 512)] = option(
        16, "N", "Tokens of a block of storage paged, 1 to 512. Default: 16."
    )
    dtype: _DType = option(
        "auto",
        "D",
        "The model's dtype: float32, bfloat16, float16 or auto. Default: auto, the checkpoint's, or bfloat16 for a "
        "quantized GGUF file.",
    )
    weights: Annotated[str | Mapping[str, str] | None, _checked(lambda _, value: parse_weights(value))] = (
        option(
            None,
            "W",
            "Quantize weights of linear layers and experts at load: int8, int4 (groups of 128), int4:64, or by pattern "
            "of names, such as *.mlp.*=int4,*=int8; bf16 makes those of a quantized checkpoint dense. Default: as in "
            "the checkpoint.",
        )
    )
    head: Annotated[str | None, _checked(lambda _, value: parse_rounding(value, "head"))] = option(
        None,
        "W",
        "Format of the head and the embeddings if `weights` is given. Default: int8, or bf16 if `weights` is bf16.",
    )
    kv_dtype: _KVDType = option(
        "auto",
        "D",
        "Format of keys and values: auto, int8, k8v4 or int4 (half the bytes of 16 bits or less), or by layer, such as "
        "int8,first:2=bf16,window=bf16 (docs/kv-formats.md). Default: auto, the model's dtype.",
    )
    max_batch_tokens: Annotated[int, _integer(1, 2**20)] = option(
        2048,
        "N",
        "The most tokens that one step computes, of all sequences together; longer prompts take several steps. "
        "Default: 2048.",
    )
    long_prefill_tokens: Annotated[int | None, _integer(0, 2**20)] = option(
        None,
        "N",
        "The most tokens that a step with other calls' requests computes of long prompts, those with more tokens to "
        "compute than this; 0: no limit. Default: 64, or 512 on a device of torch.",
    )
    max_num_seqs: Annotated[int, _integer(1, 2**16)] = option(
        256, "N", "The most sequences that run at once; others wait. Default: 256."
    )
    max_model_len: Annotated[int | None, _integer(2, 2**31 - 1)] = option(
        None, "N", "The longest sequence in tokens, prompt and answer together. Default: the model's own."
    )
    speculation: Annotated[str, _checked(lambda _, value: parse_speculation(value))] = option(
        "off",
        "P",
        "Drafts of tokens that one step checks together; no token of an answer changes. ngram: from the text's own "
        "words; suffix: also from earlier answers of the namespace; model:PATH: of a smaller model with the same "
        "tokenizer; suffix:4, model:PATH:4: at most 4 a step; auto: suffix if the model allows drafts "
        "(docs/speculation.md). Default: off.",
    )
    prefix_caching: bool = option(
        True, None, "Share the keys and values of equal beginnings among requests. Default: on."
    )
    keep_scores: bool = option(
        True,
        None,
        "Keep the log probabilities that requests ask for beside the keys and values: 4 bytes a token. Default: on.",
    )
    verify_hits: Annotated[int, _integer(0, 2**31 - 1)] = option(
        0,
        "N",
        "Compute one hit in N again while the engine is idle, and compare every bit with the cached keys and values; a "
        "difference is logged and dropped (docs/exactness.md); 0: none. Default: 0.",
        storages=_SHARING,
    )
    checkpoint_every: Annotated[int, _integer(0, 2**31 - 1)] = option(
        0,
        "N",
        "Tokens of a prompt between checkpoints of the state, for models with state layers; 0: only where prompts end "
        "or part. Default: 0.",
    )
    seed: Annotated[int, _integer(0, 2**63 - 1)] = option(
        0, "N", "Random seed of requests that give none. Default: 0."
    )
    revision: str | None = option(None, "REV", "Revision of a model on the Hub. Default: its main branch.")
    generation_config: Literal["auto", "none"] = option(
        "auto",
        "G",
        "Use of the model's generation config: auto takes its defaults of requests and its rules for tokens, none only "
        "its end tokens (docs/generation-config.md). Default: auto.",
    )
    trust_remote_code: bool = option(False, None, "Run Python code from the model's folder. Default: off.")
    device: Annotated[str, _checked(_device)] = option(
        "cpu",
        "DEVICE",
        "Where the model and the KV memory are: cpu, or a device of torch such as cuda or cuda:1, experimental "
        "(docs/gpu.md). Default: cpu.",
    )
    backend: str | None = option(
        None,
        "B",
        "The back end: native, python or a registered device; on a device of torch triton or torch. Default: native, "
        "or triton, if it is installed.",
    )
    fast: bool = option(
        False,
        None,
        "On a device of torch, its own products and norms (cuBLAS) in place of kernels whose bits do not depend on the "
        "batch; quantized weights on the back end torch are dequantized for each product. Default: off.",
    )
    num_threads: Annotated[int | None, _integer(1, 1024)] = option(
        None,
        "N",
        "Threads of the kernels, and of torch in the engine's thread. Default: the processors that the process may "
        "use, and torch's own number.",
    )
    packed_weights: Annotated[str | os.PathLike[str], BeforeValidator(_auto_off_or_folder)] = option(
        "auto",
        "DIR",
        "Where packed and quantized weights are saved for quicker starts: auto, off or a folder. It grows as large as "
        "the weights, and may be deleted. Default: auto, quire/weights in the user's cache.",
    )
    packed_weights_size: _Size | None = option(
        None,
        "SIZE",
        "The most bytes of the folder of packed weights; files unused for longest are deleted first. Default: 32GiB.",
    )
    host_cache: _Size | None = option(
        None,
        "SIZE",
        "Host memory, in addition to the KV memory, in which evicted prefixes are kept. Default: none.",
    )
    disk_cache: _Folder | None = option(
        None,
        "DIR",
        "A folder in which cached prefixes survive a restart; several engines may share it. Default: none.",
    )
    disk_cache_size: _Size | None = option(None, "SIZE", "The most bytes of the disk cache. Default: 8GiB.")
    disk_cache_min_free: _Size | None = option(
        None,
        "SIZE",
        "Bytes that the disk cache leaves free on its file system. Default: 0.",
    )
    peers: Annotated[str | None, _checked(_peer_addresses)] = option(
        None,
        "ADDRESSES",
        "Engines from whose host memory cached prefixes are fetched, HOST:PORT or unix:PATH with commas between: what "
        "they say as `peer_listen`. Default: none.",
    )
    peer_listen: Annotated[str | None, _checked(_peer_address)] = option(
        None,
        "ADDRESS",
        "Give the content of the host cache to peers that connect here, HOST:PORT or unix:PATH. Needs host_cache and "
        "cache_write through; beyond this machine also a remote_secret. Default: none.",
    )
    remote_cache: Annotated[str | None, _checked(_url)] = option(
        None,
        "URL",
        "A store in which engines share cached prefixes: redis://host:port, s3://bucket/prefix, folder:///path or "
        "mooncake://host, or env:NAME, a variable with such a URL, for one with a password. Default: none.",
        may_hide=True,
    )
    remote_secret: Annotated[str | bytes | None, _checked(_check_secret_or_text)] = option(
        None,
        None,
        "A secret, at least 16 bytes, with which engines sign the values of a remote cache and of peers; others are "
        "refused. Default: none.",
        is_secret=True,
    )
    peer_secret: Annotated[str | bytes | None, _checked(_check_secret_or_text)] = option(
        None,
        None,
        "A secret, at least 16 bytes, of peers alone, in place of remote_secret. Without peers and peer_listen the "
        "peers are those that `quire cluster` names; it needs host_cache then. Default: remote_secret.",
        is_secret=True,
    )
    cache_write: Literal["eviction", "through"] = option(
        "eviction",
        "W",
        "When the tiers (host, disk and remote cache) are written: eviction, as memory gives content up, or through, "
        "as soon as it is computed (always with sliding windows). Default: eviction.",
    )
    preemption: Literal["auto", "swap", "recompute"] = option(
        "auto",
        "P",
        "How a request is preempted if memory runs out: swap copies its keys and values to host memory, recompute "
        "computes them again, auto takes the way expected to be faster. Default: auto.",
    )
    swap_memory: Annotated[str | int, _checked(_size_or_auto)] = option(
        "auto",
        "SIZE",
        "Host memory for requests that are swapped out, in addition to the KV memory. Default: auto, a quarter of "
        "the KV memory.",
        storages=_SHARING,
    )
    pin_memory: Annotated[str | int, _checked(_share)] = option(
        "25%",
        "SIZE",
        "The most of the KV memory that pinned content may take, a size or a share. Default: 25%.",
        storages=_SHARING,
    )
    idle_trim: Annotated[float, _seconds()] = option(
        _IDLE_TRIM_S,
        "SECONDS",
        "Seconds without a request after which unused memory of the KV cache goes back to the system, and cached "
        "prefixes only if the system is short of memory (docs/pressure.md); 0: never. Default: 60.",
        storages=_SHARING,
    )
    tenant_secret: Annotated[bytes | None, _checked(lambda _, value: check_secret(value))] = option(
        None,
        None,
        "A secret, at least 16 bytes, from which tenants' namespaces are made; with the same one a tenant finds the "
        "content of lower tiers after a restart. Default: a new one in each process.",
        is_secret=True,
    )
    kv_events: str | None = option(
        None,
        "ADDR",
        "Address at which KV events are published over ZeroMQ, such as tcp://127.0.0.1:5557. Default: none.",
    )
    kv_events_replay: str | None = option(
        None, "ADDR", "Address at which subscribers ask for KV events that they missed. Default: none."
    )
    prefault: bool = option(
        False,
        None,
        "Take the KV cache's memory at the start, not at its first use. Default: off.",
        storages=("paged", "auto"),
    )
    profile: bool = option(False, None, "Measure every step, and report where the time went. Default: off.")

    @model_validator(mode="before")
    @classmethod
    def _split_storage(cls, given: ArgsKwargs) -> ArgsKwargs:
        return ArgsKwargs(given.args, spelled_out(given.kwargs or {}))

    @model_validator(mode="after")
    def _check_partners(self) -> EngineConfig:
        if self.disk_cache_size is not None and self.disk_cache is None:
            self._refuse("disk_cache_size", "disk_cache, the folder with that limit")
        if self.disk_cache_min_free is not None and self.disk_cache is None:
            self._refuse("disk_cache_min_free", "disk_cache, which leaves that much free")
        if self.packed_weights_size is not None and self.packed_weights == "off":
            self._refuse("packed_weights_size", "packed_weights, the folder with that limit")
        if self.remote_secret is not None and self.remote_cache is self.peers is self.peer_listen is None:
            self._refuse(
                "remote_secret", "remote_cache, peers or peer_listen, whose values are signed with it"
            )
        self._check_peers()
        if self.cache_write != "eviction" and not self.has_tiers:
            self._refuse("cache_write", "host_cache, disk_cache or remote_cache, which are written that way")
        if self.fast and self.device == "cpu":
            self._refuse("fast", "device, such as cuda, whose libraries compute")
        if self.speculation != "off" and self.fast:
            self._refuse(
                "speculation", "fast=False: with fast=True a row's bits depend on the number of rows"
            )
        if self.head is not None and self.weights is None:
            self._refuse("head", "weights, of which it modifies a part")
        if self.swap_memory != "auto" and self.preemption == "recompute":
            self._refuse("swap_memory", "preemption swap or auto: recompute never swaps")
        if self.prefault and self.idle_trim not in (0, _IDLE_TRIM_S):
            self._refuse("idle_trim", "prefault=False: memory taken at the start is kept")
        for entry in fields(self):
            storages = self.options()[entry.name].storages
            is_used = self.storage in storages or self.storage in REGISTERED_STORAGES
            if storages and not is_used and getattr(self, entry.name) != entry.default:
                self._refuse(entry.name, f"storage {' or '.join(storages)}; {self.storage} does not use it")
        if self.preemption == "swap" and not self._shares_blocks:
            raise ArgumentError(
                f"expected a storage whose blocks can be copied out to swap them, got {self.storage}; use storage "
                "paged or virtual, or preemption recompute - in `preemption`"
            )
        if self.kv_events_replay is not None and self.kv_events is None:
            raise ArgumentError(
                f"expected kv_events with kv_events_replay, got {self.kv_events_replay!r} alone; there is nothing to "
                "replay - in `kv_events_replay`"
            )
        if self.verify_hits and not self.prefix_caching:
            self._refuse("verify_hits", "prefix_caching: without it there are no hits")
        for names, needed in ((_TIERS, self.has_tiers), (("kv_events",), self.kv_events is not None)):
            if needed and not self.shares_prefixes:
                raise ArgumentError(
                    f"expected a cache that shares prefixes for {', '.join(names[:-1])}{' and ' * (len(names) > 1)}"
                    f"{names[-1]}, got storage {self.storage} with prefix_caching {self.prefix_caching}; use storage "
                    "paged or virtual, with prefix_caching"
                )
        return self

    def _refuse(self, name: str, needs: str) -> None:
        shown = "" if self.options()[name].is_secret else f" {getattr(self, name)!r}"
        raise ArgumentError(f"expected with {name} also {needs}; got {name}{shown} without - in `{name}`")

    @property
    def weight_formats(self) -> WeightFormats | None:
        """The formats of `weights` and `head`."""
        return None if self.weights is None else parse_weights(self.weights, self.head)

    @property
    def device_name(self) -> str | None:
        """The name of `device`, `backend` and `fast` for `quire.devices.device_of`: BACKEND@DEVICE, or
        BACKEND+fast@DEVICE, if that is not the cpu."""
        if self.device == "cpu":
            return self.backend
        return f"{self.backend or ''}{'+fast' if self.fast else ''}@{self.device}"

    @property
    def long_prompt_limit(self) -> int:
        """`long_prefill_tokens`, or its default."""
        if self.long_prefill_tokens is None:
            return 64 if self.device == "cpu" else 512
        return self.long_prefill_tokens

    def _check_peers(self) -> None:
        if self.peer_secret is not None and self.peers is self.host_cache is None:
            self._refuse("peer_secret", "host_cache, to which values of peers are fetched, or peers")
        if self.peer_listen is None:
            return
        if self.host_cache is None:
            self._refuse("peer_listen", "host_cache, whose content peers get")
        if self.cache_write != "through":
            self._refuse("peer_listen", "cache_write through: else the host cache has only evicted content")
        is_open = self.peer_secret is None and self.remote_secret is None
        if is_open and not PeerAddress.parse(self.peer_listen).is_local:
            self._refuse("peer_listen", "remote_secret: other machines can reach this address")

    @property
    def asks_peers(self) -> bool:
        """Whether it fetches from peers: those of `peers`, or with `peer_secret` alone those that calls name."""
        return self.peers is not None or (self.peer_secret is not None and self.peer_listen is None)

    @property
    def has_tiers(self) -> bool:
        return any(getattr(self, name) is not None for name in _TIERS)

    @property
    def shares_prefixes(self) -> bool:
        return self.prefix_caching and self._shares_blocks

    @property
    def _shares_blocks(self) -> bool:
        return self.storage in _SHARING or REGISTERED_STORAGES.get(self.storage, False)

    @classmethod
    @functools.cache
    def options(cls) -> dict[str, Option]:
        """The documentation of each field, by name."""
        return {entry.name: entry.metadata["option"] for entry in fields(cls)}

    @classmethod
    def from_arguments(cls, model: Any, options: Mapping[str, Any]) -> EngineConfig:
        """The config of a call's arguments: a model and options, or `config`, whose model a given one replaces."""
        config = options.get("config")
        if config is None:
            return cls(model, **{name: value for name, value in options.items() if name != "config"})
        if len(options) > 1 or not isinstance(config, EngineConfig):
            got = config if len(options) == 1 else sorted(options)
            raise ArgumentError(f"expected an EngineConfig and no other options, got {got!r} - in `config`")
        return config if model is None else replace(config, model=model)


# -- the same options in other forms ---------------------------------------------------------------


def spelled_out(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options in which `storage` is a name alone: the rest of its string becomes the option of that storage.

    *raises:* ArgumentError: a storage without such an option; an option that is given already, with another value; an
    option of comparisons.
    """
    storage = options.get("storage")
    name, colon, text = storage.partition(":") if isinstance(storage, str) else ("", "", "")
    for compared, option_name in COMPARED_OPTIONS.items():
        if option_name in options or (colon and name == compared):
            given = options.get(option_name, text)
            raise ArgumentError(
                f"expected storage {compared} without {option_name}, got {given!r}: an engine has its default; compare "
                f"others by `quire compare --{option_name} {given}` - in `{option_name}`"
            )
    if not colon:
        return dict(options)
    partner = OPTION_OF_STORAGE.get(name)
    if partner is None or not text:
        raise ArgumentError(
            "expected a storage, or one with its option such as paged:32 or virtual:256KiB, got "
            f"{storage!r} - in `storage`"
        )
    value = int(text) if partner == "block_size" and text.isdecimal() else text
    if options.get(partner, value) != value:
        raise ArgumentError(
            f"expected {partner} once, got {value!r} in storage {storage!r} and {options[partner]!r} - in `{partner}`"
        )
    return {**options, "storage": name, partner: value}


def with_flags(table: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a file and of flags. Flags win: a storage of the flags replaces the file's string, its option too."""
    if "storage" not in flags:
        table = spelled_out(table)
    return {**table, **spelled_out(flags)}


def takes_options(
    config: Callable[Parameters, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Parameters], None]]:
    """For type checkers: an `__init__` takes the arguments of `config`. Does nothing at run time."""
    return lambda method: method


def shows_options(method: Method) -> Method:
    """For `help`: gives an `__init__` the options, or `config`, as signature, and their texts as docstring."""
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    config = inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=EngineConfig | None
    )
    signature = inspect.Signature([this, *_parameters(EngineConfig), config], return_annotation=None)
    method.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    lines = [f"{name}: {about.help}" for name, about in EngineConfig.options().items()]
    method.__doc__ = "\n".join([*lines, "config: all of them at once."])
    return method
