"""`EngineConfig`: every option of an engine, in one class, checked before anything is loaded.

    a keyword of `quire.LLM` and `quire.AsyncEngine`
    a flag of the verbs that open an engine (`quire.cli.options`)
    a key of the [model] table of a server's file (`quire.server.settings`)
    an input of what reckons what fits (`quire.engine.open_storage`, `quire.engine.kv_budget`)

are one field here: an option is added by one line. What an option does stands where it is used. What only a machine or
a model can tell (whether so much memory is free, whether a token fits into a piece) is checked there too.

Invariants
    O1  a config that exists has options of the right type, within their range, none of which means nothing beside
        the others.
    O2  making one reads no file, makes no folder and imports neither torch nor transformers.
    O3  whatever is wrong is one ArgumentError that names the option.

Cost: some 20 us for each config.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, field, fields, replace
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, get_type_hints

from pydantic import BeforeValidator, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from quire.errors import ArgumentError
from quire.registry import Registry
from quire.renamed import with_new_names
from quire.secret_text import resolve_secret
from quire.sizes import parse_budget, parse_share, parse_size
from quire.spec.kv_dtype import kv_dtype_text
from quire.spec.kv_formats import element_formats
from quire.spec.weight_formats import WeightFormats, parse_rounding, parse_weights

__all__ = [
    "OPTION_OF_STORAGE",
    "REGISTERED_STORAGES",
    "STORAGES",
    "EngineConfig",
    "Option",
    "check_secret",
    "parse_growth",
    "secret_bytes",
    "shows_options",
    "spelled_out",
    "takes_options",
    "with_flags",
]

# Each storage, and the option that may follow its name in one string: "growing:together:256".
OPTION_OF_STORAGE = {
    "paged": "block_size",
    "contiguous": "reservation",
    "growing": "growth",
    "virtual": "piece_size",
}
STORAGES = tuple(OPTION_OF_STORAGE)

# Those that `quire.engine.open_storage.register` added, and whether sequences can share blocks there.
REGISTERED_STORAGES: Registry[bool] = Registry("a storage", "storage", {})

_SHARING = ("paged", "virtual", "auto")  # storages of which sequences can share blocks
_TIERS = ("host_cache", "disk_cache", "remote_cache")
_LEAST_SECRET = 16  # bytes
_IDLE_TRIM_S = 60.0

Parameters = ParamSpec("Parameters")
Made = TypeVar("Made", bound=type)
Method = TypeVar("Method", bound=Callable[..., None])


@plain_dataclass(frozen=True)
class Option:
    """What a field of `EngineConfig` tells people.

    storages: those that it means something to; none: all. short: a second name of its flag. is_secret: neither a flag
    nor a key of [model], and not shown. may_hide: its value may have a secret in it, and is not shown.
    """

    metavar: str | None
    help: str
    storages: tuple[str, ...] = ()
    short: str | None = None
    is_secret: bool = False
    may_hide: bool = False


def option(default: Any, *about: Any, **more: Any) -> Any:
    """A field of `EngineConfig`: its default, and what `Option` takes."""
    made = Option(*about, **more)
    return field(default=default, repr=not (made.is_secret or made.may_hide), metadata={"option": made})


# -- what a value may be; None is left to the type --------------------------------------------------


def _checked(check: Callable[[str, Any], Any]) -> BeforeValidator:
    """check: called with the option's name and a value; raises ArgumentError."""

    def run(value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            check(str(info.field_name), value)
        return value

    return BeforeValidator(run)


def _integer(low: int, high: int) -> BeforeValidator:
    def run(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= value <= high:
            raise ArgumentError(f"expected an integer of {low} to {high}, got {value!r}")
        return operator.index(value)

    return BeforeValidator(run)


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


def _folder(name: str, value: Any) -> None:
    # An empty name, as of a variable that is not set, would be the folder the process happens to be in.
    if not isinstance(value, str | os.PathLike) or not str(os.fspath(value)).strip():
        raise ArgumentError(f"expected a folder, got {value!r}")


def _kept(value: Any) -> Any:
    if not isinstance(value, str | os.PathLike) or not str(os.fspath(value)).strip():
        raise ArgumentError(f"expected auto, off or a folder, got {value!r}")
    return value


def _url(name: str, value: Any) -> None:
    if isinstance(value, str):
        resolve_secret(value, f"`{name}`")


def parse_growth(growth: str) -> tuple[str, int | None]:
    """("spread", None), ("together", None) or, of "together:N", ("together", N). *raises:* ArgumentError."""
    name, colon, tokens = str(growth).partition(":")
    if not colon and name in ("spread", "together"):
        return name, None
    if name == "together" and tokens.isdecimal() and int(tokens) > 0:
        return name, int(tokens)
    raise ArgumentError(
        f"expected spread, together or together:N with N tokens, got {growth!r} - in `growth`"
    )


def check_secret(secret: Any, name: str = "tenant_secret") -> None:
    """*raises:* ArgumentError for one that is no secret; it is not shown."""
    if secret is not None and not (isinstance(secret, bytes) and len(secret) >= _LEAST_SECRET):
        got = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
        raise ArgumentError(
            f"expected at least {_LEAST_SECRET} bytes, got {got} - in `{name}`; secrets.token_bytes makes some"
        )


def secret_bytes(secret: str | bytes) -> bytes:
    """Of a secret that may be text."""
    return secret.encode(errors="surrogatepass") if isinstance(secret, str) else secret


def _text_or_secret(name: str, value: Any) -> None:
    check_secret(secret_bytes(value) if isinstance(value, str) else value, name)


def _dtype(value: Any) -> str:
    """*raises:* ArgumentError for what is no registered format of keys and values."""
    *most, last = ("auto", *element_formats())
    if (name := str(value).removeprefix("torch.")) not in (*most, last):
        raise ArgumentError(f"expected {', '.join(most)} or {last}, got {name!r} - in `dtype`")
    return name


def _kv_dtype(value: Any) -> str:
    return kv_dtype_text(value if isinstance(value, Mapping) else str(value))


_Size = Annotated[str | int, _checked(lambda name, value: parse_size(value, where=name))]
_Folder = Annotated[str | os.PathLike[str], _checked(_folder)]
_DType = Annotated[str, BeforeValidator(_dtype)]
_KVDType = Annotated[str | Mapping[str | int, str], BeforeValidator(_kv_dtype)]


# -- how it is told ----------------------------------------------------------------------------------


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
    """The first thing that is wrong, as: expected, got, where."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    own = first.get("ctx", {}).get("error")
    if first["type"] == "unexpected_keyword_argument":
        return ArgumentError(f"expected only {', '.join(sorted(config.options()))}, got {name}")
    if first["type"] == "unexpected_positional_argument":
        return ArgumentError(f"expected a model and options by name, got {first['input']!r} behind the model")
    if isinstance(own, ArgumentError):
        text = str(own)
    else:
        expected = first["msg"].removeprefix("Input should be ").replace("'", "")
        expected = expected.replace("a valid integer", "an integer").replace("a valid ", "a ")
        text = f"expected {expected}, got {first['input']!r}"
    return ArgumentError(text if not name or " - in `" in text else f"{text} - in `{name}`")


def _in_our_words(config: Made) -> Made:
    """What pydantic says is wrong becomes an ArgumentError; `help` and editors see plain types."""
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


@_in_our_words
@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class EngineConfig:
    """Options of an engine, see the module's text; `EngineConfig.options()` tells what each is.

    A storage and its option may be one string: storage="growing:together:256" is storage="growing",
    growth="together:256"; so are "paged:32", "contiguous:pow2" and "virtual:256KiB". `storage` is the name alone
    afterwards. An option that says something only about another one is refused without it; one that has its default
    counts as not given.

    *raises:* ArgumentError: expected, got, and the option's name.
    """

    model: Any = option(
        None, "M", "Folder, GGUF file or Hub id; the embedded model if not given.", short="-m"
    )
    _: KW_ONLY
    kv_memory: Annotated[str | int, _checked(_kv_memory)] = option(
        "auto",
        "SIZE",
        'Memory for keys and values: "1GiB", "40%" of what is free, or auto: half, if so much is of use.',
    )
    storage: Annotated[str, _checked(_storage)] = option(
        "paged",
        "S",
        "How keys and values are kept: paged, contiguous, growing, virtual or auto (virtual where the machine can); "
        "with its option: paged:32, contiguous:pow2, growing:together:256, virtual:256KiB.",
    )
    reservation: Literal["max", "pow2", "exact"] = option(
        "max", "R", "What contiguous reserves for a sequence: max, pow2 or exact.", storages=("contiguous",)
    )
    growth: Annotated[str, _checked(lambda _, value: parse_growth(value))] = option(
        "spread",
        "G",
        "When growing replaces buffers: spread, or together[:N], all at once by N tokens.",
        storages=("growing",),
    )
    piece_size: _Size = option(
        "64KiB",
        "SIZE",
        "What virtual maps together, of a layer's keys or values: 4KiB to 2MiB.",
        storages=("virtual", "auto"),
    )
    block_size: Annotated[int, _integer(1, 512)] = option(
        16, "N", "Tokens of a block of paged storage, 1 to 512."
    )
    dtype: _DType = option(
        "auto",
        "D",
        "float32, bfloat16, float16 or auto: the checkpoint's, bfloat16 for a quantized GGUF file.",
    )
    weights: Annotated[str | Mapping[str, str] | None, _checked(lambda _, value: parse_weights(value))] = (
        option(
            None,
            "W",
            "Round weights of linear layers and experts as the checkpoint is loaded: int8, int4 (groups of 128), "
            "int4:64, or by pattern of names: *.mlp.*=int4,*=int8. bf16 widens those of a quantized checkpoint.",
        )
    )
    head: Annotated[str | None, _checked(lambda _, value: parse_rounding(value, "head"))] = option(
        None,
        "W",
        "The same for head and embeddings beside `weights`: int8 unless it is said, bf16 beside bf16.",
    )
    kv_dtype: _KVDType = option(
        "auto",
        "D",
        "What K and V are kept in: auto, the model's dtype; int8, k8v4 or int4, half the bytes of 16 bits and less; or "
        "by layer: int8,first:2=bf16,window=bf16 (docs/kv-formats.md).",
    )
    max_batch_tokens: Annotated[int, _integer(1, 2**20)] = option(2048, "N", "Tokens of a step.")
    max_num_seqs: Annotated[int, _integer(1, 2**16)] = option(256, "N", "Sequences that run at once.")
    max_model_len: Annotated[int | None, _integer(2, 2**31 - 1)] = option(
        None, "N", "Longest sequence, prompt and answer together; the model's own if not given."
    )
    prefix_caching: bool = option(True, None, "Requests share the keys and values of equal beginnings.")
    checkpoint_every: Annotated[int, _integer(0, 2**31 - 1)] = option(
        0,
        "N",
        "Keep a state each so many tokens of a prompt (models with state layers); 0: where prompts end or part.",
    )
    seed: Annotated[int, _integer(0, 2**63 - 1)] = option(0, "N", "Seed of requests that bring none.")
    revision: str | None = option(None, "REV", "Revision of a model on the Hub.")
    generation_config: Literal["auto", "none"] = option(
        "auto",
        "G",
        "auto: defaults of requests and rules for tokens are those of the model's generation config; none: of it only "
        "the end tokens are read (docs/generation-config.md).",
    )
    trust_remote_code: bool = option(False, None, "Run Python code that comes with the model.")
    backend: str | None = option(
        None, "B", "native, python, or a device that was registered; native where the extension is built."
    )
    num_threads: Annotated[int | None, _integer(1, 1024)] = option(
        None, "N", "Threads of the kernels, and of torch in the thread that computes the steps."
    )
    packed_weights: Annotated[str | os.PathLike[str], BeforeValidator(_kept)] = option(
        "auto",
        "DIR",
        "Where weights are kept as the kernels read them, codes too, for quicker starts: auto, quire/weights in the "
        "user's cache; off, in no file; or a folder. As large as the weights; may be deleted.",
    )
    packed_weights_size: _Size | None = option(
        None,
        "SIZE",
        "What that folder may take, files used longest ago going first; 32GiB if not given.",
    )
    host_cache: _Size | None = option(None, "SIZE", "Host memory for blocks evicted from the KV memory.")
    disk_cache: _Folder | None = option(
        None, "DIR", "Folder in which cached prefixes survive a restart; several engines may share it."
    )
    disk_cache_size: _Size | None = option(None, "SIZE", "What the disk cache may take; 8GiB if not given.")
    disk_cache_min_free: _Size | None = option(
        None,
        "SIZE",
        "What the disk cache leaves free of its file system, whatever it may take; nothing if not given.",
    )
    remote_cache: Annotated[str | None, _checked(_url)] = option(
        None,
        "URL",
        "Redis server that engines share cached prefixes on: redis://host:port, or env:NAME, the variable that has "
        "such a URL, as for one with a password.",
        may_hide=True,
    )
    remote_secret: Annotated[str | bytes | None, _checked(_text_or_secret)] = option(
        None,
        None,
        "What engines that share a remote cache sign its values with, 16 bytes or more: others' values are refused.",
        is_secret=True,
    )
    cache_write: Literal["eviction", "through"] = option(
        "eviction",
        "W",
        "When the tiers are written: eviction or through (at once; with sliding windows always).",
    )
    preemption: Literal["auto", "swap", "recompute"] = option(
        "auto", "P", "What becomes of a request without memory: auto, swap or recompute."
    )
    swap_memory: Annotated[str | int, _checked(_size_or_auto)] = option(
        "auto",
        "SIZE",
        "Host memory for swapped out requests; auto: a quarter of the KV memory.",
        storages=_SHARING,
    )
    pin_memory: Annotated[str | int, _checked(_share)] = option(
        "25%", "SIZE", "What pins may take of the KV memory, a size or a share.", storages=_SHARING
    )
    idle_trim: Annotated[float, _seconds()] = option(
        _IDLE_TRIM_S,
        "SECONDS",
        "After so long without a request memory of the KV cache that holds nothing goes back to the system. Cached "
        "prefixes stay unless the system is short of memory (docs/pressure.md). 0: nothing goes.",
        storages=_SHARING,
    )
    tenant_secret: Annotated[bytes | None, _checked(lambda _, value: check_secret(value))] = option(
        None,
        None,
        "What tenants' namespaces are made from, 16 bytes or more; another one in each process if not given. With the "
        "same one a tenant finds what lower tiers have after a restart.",
        is_secret=True,
    )
    kv_events: str | None = option(
        None, "ADDR", "Publish KV events over ZeroMQ there, such as tcp://127.0.0.1:5557."
    )
    kv_events_replay: str | None = option(
        None, "ADDR", "Where subscribers ask for the KV events they missed."
    )
    prefault: bool = option(
        False,
        None,
        "Take the KV cache's memory at the start, not as it is first used.",
        storages=("paged", "auto"),
    )
    profile: bool = option(False, None, "Take the times of every step, and tell where the time went.")

    @model_validator(mode="before")
    @classmethod
    def _split_storage(cls, given: ArgsKwargs) -> ArgsKwargs:
        options = with_new_names(given.kwargs or {}, {"park_memory": "swap_memory"}, stacklevel=5)
        if options.get("preemption") == "park":
            warnings.warn('preemption "park" is called "swap" now', DeprecationWarning, stacklevel=4)
            options["preemption"] = "swap"
        return ArgsKwargs(given.args, spelled_out(options))

    @model_validator(mode="after")
    def _check_partners(self) -> EngineConfig:
        if self.disk_cache_size is not None and self.disk_cache is None:
            self._refuse("disk_cache_size", "disk_cache, the folder that may be so large")
        if self.disk_cache_min_free is not None and self.disk_cache is None:
            self._refuse("disk_cache_min_free", "disk_cache, which is to leave so much")
        if self.packed_weights_size is not None and self.packed_weights == "off":
            self._refuse("packed_weights_size", "packed_weights, the folder that may be so large")
        if self.remote_secret is not None and self.remote_cache is None:
            self._refuse("remote_secret", "remote_cache, whose values are signed with it")
        if self.cache_write != "eviction" and not self.has_tiers:
            self._refuse("cache_write", "host_cache, disk_cache or remote_cache, which are written so")
        if self.head is not None and self.weights is None:
            self._refuse("head", "weights, of whose rounding it says a part")
        if self.swap_memory != "auto" and self.preemption == "recompute":
            self._refuse("swap_memory", "preemption swap or auto: recompute swaps out nothing")
        if self.prefault and self.idle_trim not in (0, _IDLE_TRIM_S):
            self._refuse("idle_trim", "prefault=False: memory taken at the start is kept")
        for entry in fields(self):
            storages = self.options()[entry.name].storages
            is_told = self.storage in storages or self.storage in REGISTERED_STORAGES
            if storages and not is_told and getattr(self, entry.name) != entry.default:
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
        """What `weights` and `head` say."""
        return None if self.weights is None else parse_weights(self.weights, self.head)

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
        """What each field tells people, by name."""
        return {entry.name: entry.metadata["option"] for entry in fields(cls)}

    @classmethod
    def of(cls, model: Any, options: Mapping[str, Any]) -> EngineConfig:
        """What a call is given: a model and options, or a model, which wins, and `config`."""
        config = options.get("config")
        if config is None:
            return cls(model, **{name: value for name, value in options.items() if name != "config"})
        if len(options) > 1 or not isinstance(config, EngineConfig):
            got = config if len(options) == 1 else sorted(options)
            raise ArgumentError(f"expected an EngineConfig and no other options, got {got!r} - in `config`")
        return config if model is None else replace(config, model=model)


# -- the same options in other forms ---------------------------------------------------------------


def spelled_out(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options in which `storage` is a name alone: what its string says beside it is the option that it stands for.

    *raises:* ArgumentError: a storage that takes none; an option that is there already, with another value.
    """
    storage = options.get("storage")
    name, colon, text = storage.partition(":") if isinstance(storage, str) else ("", "", "")
    if not colon:
        return dict(options)
    beside = OPTION_OF_STORAGE.get(name)
    if beside is None or not text:
        raise ArgumentError(
            "expected a storage, or one with its option such as paged:32, contiguous:pow2, growing:together:256 or "
            f"virtual:256KiB, got {storage!r} - in `storage`"
        )
    value = int(text) if beside == "block_size" and text.isdecimal() else text
    if options.get(beside, value) != value:
        raise ArgumentError(
            f"expected {beside} once, got {value!r} in storage {storage!r} and {options[beside]!r} - in `{beside}`"
        )
    return {**options, "storage": name, beside: value}


def with_flags(table: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a file and of flags, which win: a storage of the flags over all that the file's string says."""
    if "storage" not in flags:
        table = spelled_out(table)
    return {**table, **spelled_out(flags)}


def takes_options(
    config: Callable[Parameters, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Parameters], None]]:
    """For type checkers: an `__init__` takes what `config` does. Nothing happens at run time."""
    return lambda method: method


def shows_options(method: Method) -> Method:
    """For `help`: an `__init__` takes the options, or `config`; its text tells what each is."""
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    config = inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=EngineConfig | None
    )
    signature = inspect.Signature([this, *_parameters(EngineConfig), config], return_annotation=None)
    method.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    told = [f"{name}: {about.help}" for name, about in EngineConfig.options().items()]
    method.__doc__ = "\n".join([*told, "config: all of them at once."])
    return method
