"""
Quire's native back end: block manager, attention, linear, recurrences.
"""

from collections.abc import Sequence
from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray

class GroupPlan:
    """One group's part of a step; see quire.cache.protocol.GroupPlan."""

    @property
    def step(self) -> int:
        """
        Number of the step: 1 for a cache's first successful `reserve`, then 2, ...
        """

    @property
    def query_start(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        int32 [n + 1]: the new tokens of sequence i are rows query_start[i] .. query_start[i + 1] - 1.
        """

    @property
    def context_lengths(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        int32 [n]: each sequence's length once the step's new tokens are in; lookahead not counted.
        """

    @property
    def slot_mapping(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        int64 [query_start[n]]: block * size + offset of each new token, sequences in order. -1 only in the
        plan of a `restore`, which no step computes: behind a window.
        """

    @property
    def lookahead_slots(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        int64 [n * num_lookahead]: block * size + offset of each lookahead position, which follow the
        new tokens; those of sequence i are at i * num_lookahead .. (i + 1) * num_lookahead - 1.
        """

    @property
    def block_tables(self) -> NDArray[numpy.int32]:
        """
        int32 [n, widest], made when asked for. Row i has ceil((context_lengths[i] + num_lookahead) /
        size) entries, then -1; -1 also where a block behind a window has been given up.
        """

    @property
    def copies(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None, None))]:
        """
        int32 [m, 3] (source block, destination block, tokens): to be done before the step writes.
        """

class StepPlan(GroupPlan):
    """What `reserve` decided; see quire.cache.protocol.StepPlan."""

    @property
    def num_groups(self) -> int:
        """Groups of the cache, g."""

    def group(self, index: int) -> GroupPlan:
        """The same arrays for group `index`; IndexError beyond the last group."""

class BlockManager:
    """
    The calls of quire.cache.manager.block_manager.PythonBlockManager in C++: the same names, arguments, answers and errors. Not thread-safe.
    """

    def __init__(
        self,
        spans: Sequence[tuple[str, int]],
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        watermark_blocks: int,
        overlapped_steps: bool,
        run_blocks: int,
        blocks_per_node: Sequence[int] = [],
        eviction: str = "frequency",
    ) -> None: ...
    def match(
        self,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        namespace: bytes,
        key_positions: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        keys: Sequence[bytes],
    ) -> int: ...
    def open(
        self,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        namespace: bytes,
        key_positions: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        keys: Sequence[bytes],
        owner_id: int = 0,
        cache_priority: int = 1,
        most_cached: int = 2147483647,
    ) -> int: ...
    def append(
        self,
        sequence: int,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None: ...
    def tokens(self, sequence: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    def num_tokens(self, sequence: int) -> int: ...
    def num_cached_tokens(self, sequence: int) -> int: ...
    def num_computed_tokens(self, sequence: int) -> int: ...
    def num_blocks_needed(
        self,
        sequences: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        num_new_tokens: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        num_lookahead: int,
    ) -> int: ...
    def reserve(
        self, sequences: NDArray[numpy.int64], num_new_tokens: NDArray[numpy.int64], num_lookahead: int
    ) -> StepPlan | None: ...
    def num_blocks_to_restore(self, sequence: int, num_computed_tokens: int) -> int: ...
    def restore(self, sequence: int, num_computed_tokens: int) -> StepPlan | None: ...
    def commit(self, sequence: int, num_computed_tokens: int) -> None: ...
    def advance(
        self,
        sequences: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        num_computed_tokens: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None: ...
    def complete(self, step: int) -> None: ...
    def fork(self, sequence: int) -> int: ...
    def rewind(self, sequence: int, position: int) -> int: ...
    def close(self, sequence: int) -> None: ...
    def withdraw(self, sequence: int) -> None: ...
    def is_findable(self, sequence: int) -> bool: ...
    def reset(self) -> None: ...
    def resize(
        self, num_blocks: int, watermark_blocks: int
    ) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    def counts(self) -> tuple[int, int, int, int]: ...
    def stats(self) -> dict[str, int]: ...
    def check(self) -> None: ...
    def block_table(
        self, sequence: int, group: int
    ) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    @property
    def most_blocks(self) -> int: ...
    @property
    def num_visited(self) -> int: ...
    def explain(
        self,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        namespace: bytes,
        key_positions: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        keys: Sequence[bytes],
    ) -> tuple[int, int, Annotated[NDArray[numpy.int32], dict(shape=(None,))]]: ...
    def drop(
        self,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        namespace: bytes,
        key_positions: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        keys: Sequence[bytes],
    ) -> tuple[int, int]: ...
    def evict_path(
        self,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        namespace: bytes,
        key_positions: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        keys: Sequence[bytes],
    ) -> int: ...
    def set_cache_priority(
        self,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        namespace: bytes,
        key_positions: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        keys: Sequence[bytes],
        cache_priority: int,
        start: int,
    ) -> tuple[int, int]: ...
    def set_limits(self, owner_id: int, floor_blocks: int, quota_blocks: int) -> None: ...
    def owner_counts(self, owner_id: int) -> tuple[int, int, int]: ...
    def num_available_blocks(self, owner_id: int) -> int: ...
    def max_owner_blocks(self, owner_id: int) -> int: ...
    def record_events(self, is_on: bool) -> None: ...
    @property
    def num_events(self) -> int: ...
    def take_events(self) -> dict[str, Any]: ...
    def tree(self) -> dict[str, Any]: ...
    def block_map(
        self,
    ) -> tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
        Annotated[NDArray[numpy.int32], dict(shape=(None,))],
    ]: ...
    def content_of(self, block_id: int) -> tuple[bytes, NDArray[numpy.int32], int] | None: ...
    def namespaces(self) -> list[bytes]: ...

def isa() -> str:
    """
    Name of the instruction set the kernels use. Raises ValueError where QUIRE_ISA names one that cannot run.
    """

def supported_isas() -> list[str]:
    """
    Names of all variants that run on this processor, the richest instruction set first. Those of a build with QUIRE_TEST_KERNELS end in the emulated ones.
    """

def num_threads() -> int:
    """Threads the kernels use."""

def set_num_threads(num_threads: int) -> None:
    """Sets the threads the kernels use, at least 1."""

def start_recording() -> None:
    """
    Records this thread's operators from now on; what was recorded is forgotten.
    """

def take_records() -> bytes:
    """
    Ends the recording. int64 [n, 3] as bytes: operator (0 linear, 1 attention, 2 KV write, 3 a fused one that holds such), start and duration in ns of time.perf_counter_ns().
    """

def copy_rows(payload: object, pieces: object, to_storage: bool) -> None:
    """
    Copies rows between a payload (uint8, contiguous) and a storage. pieces: int64 [n, 5], of each its offset in the payload, its address in the storage, its number of rows, bytes of a row (adjacent in the payload) and their distance in the storage. Raises ValueError for a piece that is not within the payload; the addresses in the storage are the caller's word.
    """

SHORTEST_READ: int = 241

def read_now(reads: Sequence[tuple[int, int, object, Sequence[object]]]) -> list[int]:
    """
    Reads values that the system has in memory, each (descriptor, offset, front, parts) into its front and then its parts, writable buffers, the parts of SHORTEST_READ bytes or more together. The XXH3-64 of the parts of the leading values; ends before the first for which it would have to wait. Holds Python's lock only before and after. Raises OSError.
    """

class PackedWeight:
    """A linear layer's weight packed once for the kernels."""

    def __init__(self, weight: object, isa: str | None = None) -> None:
        """
        Packs a weight [num_outputs, num_inputs] of float32, bfloat16 or float16, of any strides. isa: a variant's name, default the one in use. The weight may be freed afterwards.
        """

    @staticmethod
    def at(packed: object, num_outputs: int, num_inputs: int, dtype: str, isa: str | None) -> PackedWeight:
        """
        A weight that was packed before with the same panel_layout, read where it lies: packed_num_bytes bytes (uint8) at a multiple of 64, which it keeps alive.
        """

    @staticmethod
    def of_codes(
        codes: object,
        bits: int,
        group: int,
        scales: tuple,
        minimums: object | None,
        zeros: object | None,
        zero: float,
        table: object | None,
        dtype: str,
        isa: str | None,
    ) -> PackedWeight:
        """
        A weight held as codes (quire.weights.codes.QuantizedWeight), uint8 [num_outputs, num_inputs] below 2**bits, for activations of a dtype. scales, minimums: (fine, coarse or None, whether the bytes of fine are signed). All contiguous; may be freed afterwards.
        """

    def of_panels(self, num_outputs: int, packed: object | None = None) -> PackedWeight:
        """
        A weight of num_outputs outputs in the form of this one, which is held as codes. packed: its panels (uint8, at a multiple of 64), read where they lie and kept alive; None: memory of its own, to be filled by put_panels.
        """

    def put_panels(self, first: int, part: PackedWeight) -> None:
        """
        Copies the panels of part, outputs from first on, a multiple of 16. Before anybody multiplies by this weight.
        """

    def goes_with(self, other: PackedWeight) -> bool:
        """Whether one fused product takes this weight and the other."""

    def multiply(self, x: object, bias: object | None, out: object) -> None:
        """
        out [rows, num_outputs] = x [rows, num_inputs] times the weight + bias [num_outputs] (or None); all contiguous, of the weight's dtype.
        """

    def unpack(self, out: object) -> None:
        """Writes the weight, bit for bit, contiguous [num_outputs, num_inputs]."""

    def gather_rows(self, ids: object, out: object) -> None:
        """
        Rows of the weight for int64 ids, contiguous [num_ids, num_inputs]. Raises IndexError for an id out of range.
        """

    def gather_rows_in(self, ids: object, out: object) -> None:
        """
        gather_rows of codes, in the dtype of out: float32, bfloat16 or float16.
        """

    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def is_quantized(self) -> bool:
        """Whether it is held as codes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed form."""

    @property
    def address(self) -> int:
        """Where they are."""

    @property
    def isa(self) -> str:
        """The variant it is packed for."""

def multiply_each(weights: Sequence[PackedWeight], x: object, out: object) -> None:
    """
    out [rows, weights, num_outputs]: x [rows, i, num_inputs] times weight i, for every i. Weights of one dtype, variant and shape; only the last dimension of x and out has to be dense.
    """

def panel_layout(dtype: str, isa: str | None = None) -> str:
    """
    Names the packed form of a dtype for a variant: under equal names equal weights have equal packed bytes.
    """

def packed_num_bytes(num_outputs: int, num_inputs: int, dtype: str, isa: str | None = None) -> int:
    """Bytes of the packed form of a weight."""

class PagedView:
    """One layer's keys and values, which it keeps alive."""

    @overload
    def __init__(
        self,
        k: object,
        v: object,
        k_scale: object,
        v_scale: object,
        dtype: str,
        k_offset: object | None = None,
    ) -> None:
        """
        k [num_blocks, num_kv_heads, block_size, k_width] and v likewise (v_width): codes of 8 bits as uint8; k_scale and v_scale [num_blocks, num_kv_heads, block_size], bfloat16, behind the codes of their rows. Codes of 4 bits: two in a byte, of v or of both, and scales [.., block_size, groups], one for each 32. dtype: of what is written and of queries. k_offset: float32 [num_kv_heads, k_width], taken from keys before they are turned, or None.
        """

    @overload
    def __init__(self, k: object, v: object) -> None:
        """
        k [num_blocks, num_kv_heads, block_size, k_width] and v likewise (v_width), of float32, bfloat16 or float16; the last dimension is dense, other strides are as they are. Where v begins where k does, values are the keys' first columns.
        """

class AttentionBatch:
    """
    A step's rows and block tables, int32 and contiguous, which it keeps alive.
    """

    def __init__(
        self,
        query_start: object,
        context_lengths: object,
        block_tables: object,
        num_threads: int,
        share_prefixes: bool = True,
    ) -> None:
        """
        query_start [n + 1], rising from 0; context_lengths [n]; block_tables [n, widest]. None of them may change.
        """

    def traffic(self, view: PagedView, num_q_heads: int, options: AttentionOptions) -> tuple[int, int, int]:
        """
        Bytes of keys and values that a call reads, what they would be without sharing, and the number of shared runs.
        """

class AttentionOptions:
    """A layer's settings; it keeps `sinks` and `slopes` alive."""

    def __init__(
        self,
        scale: float,
        window: int,
        chunk: int,
        softcap: float,
        sinks: object | None,
        slopes: object | None = None,
    ) -> None:
        """
        window, chunk, softcap: 0 for none. sinks: float32 [num_q_heads], or None. slopes: likewise; a head's, times the key's position less the query's, is added to a score.
        """

def attention_write(view: PagedView, k: object, v: object, slots: object, num_threads: int) -> None:
    """
    Stores keys [tokens, num_kv_heads, k_width] and values of the view's type in int64 slots [tokens]. Raises ValueError for a slot outside the view.
    """

def attention_run(
    view: PagedView, query: object, out: object, batch: AttentionBatch, options: AttentionOptions
) -> None:
    """
    Attention of a batch: out [rows, num_q_heads, v_width] of query [rows, num_q_heads, k_width], both of the view's type. Raises ValueError for a block outside the view.
    """

def read_bandwidth(num_bytes: int, repetitions: int) -> float:
    """
    Bytes per second at which all threads together read a buffer of num_bytes; the best of `repetitions`.
    """

class Norm:
    """A norm over a row; it keeps its weight and bias alive."""

    def __init__(self, kind: str, weight: object, bias: object | None, epsilon: float) -> None:
        """kind: rms or layer. weight, bias: float32 [width]; a bias may be None."""

    def run(self, x: object, out: object) -> None:
        """The norm of each row of x [rows, width], contiguous."""

class Surroundings:
    """Norms before and after a half of a layer, and its residual."""

    def __init__(self, before: Norm | None, after: Norm | None, residual_scale: float | None) -> None:
        """residual_scale: of what is added to the input; None: nothing is added."""

class AttentionBlock:
    """
    The attention half of a decoder layer. It keeps alive what it is made of.
    """

    def __init__(
        self,
        around: Surroundings,
        qkv: Sequence[tuple[PackedWeight, object]],
        q_norm: Norm | None,
        k_norm: Norm | None,
        norm_heads: bool,
        rotation: str,
        output: PackedWeight,
        output_bias: object | None,
        num_q_heads: int,
        gated: bool = False,
    ) -> None:
        """
        gated: behind each head of q its gate, the sigmoid of which multiplies what the head attends to. qkv: weight and bias (or None) of q, k and v, or of one product that gives them in this order.
        """

    def run(
        self,
        view: PagedView,
        batch: AttentionBatch,
        options: AttentionOptions,
        slots: object,
        cos: object | None,
        sin: object | None,
        hidden: object,
        out: object,
    ) -> None:
        """
        Stores the rows' K and V in int64 slots [rows] and writes out [rows, width] of hidden [rows, width]; cos and sin [rows, table width], or None where nothing turns. Raises ValueError for a slot or a block outside the view.
        """

class MlpBlock:
    """The MLP half of a decoder layer. It keeps alive what it is made of."""

    def __init__(
        self,
        around: Surroundings,
        inputs: Sequence[tuple[PackedWeight, object]],
        gated: bool,
        activation: str,
        output: PackedWeight,
        output_bias: object | None,
    ) -> None:
        """inputs: weight and bias (or None) of gate and up, or of one product."""

    def run(self, hidden: object, out: object) -> None:
        """out [rows, width] of hidden [rows, width]; it may be hidden."""

class Decoder:
    """
    Layers one after another over one cache, and what stands around them, all of which it keeps alive.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[AttentionBlock, MlpBlock]],
        views: Sequence[PagedView],
        options: Sequence[AttentionOptions],
        tables: Sequence[int],
        embedding: PackedWeight | None,
        norm: Norm,
        head: PackedWeight,
        head_bias: object | None,
    ) -> None:
        """
        tables: which of a step's tables leads to each layer. embedding: None where the caller brings the embedded rows.
        """

    def run(
        self,
        batches: Sequence[AttentionBatch],
        slots: Sequence[object],
        ids: object,
        hidden: object | None,
        positions: object,
        cos: object | None,
        sin: object | None,
        logit_rows: object,
        logits: object,
    ) -> None:
        """
        From token ids [rows], or embedded rows [rows, width] that are written over, to logits [num_logits, outputs] of logit_rows. batches and slots [rows]: of each table; cos and sin [num_positions, table width]: a row takes its position's; None where nothing turns. Indices are int64. Raises IndexError for a token, a position or a row that is not there, ValueError for a slot or a block outside a view.
        """

def argmax_rows(x: object, indices: object, best: object, isa: str | None = None) -> None:
    """
    The first index (int64) of the largest element of each row of x [rows, width], contiguous, and the element as float32; of the first NaN where a row has one.
    """

class RecurrenceStep:
    """The rows, slots and checkpoints of one call of a recurrence; a copy."""

    def __init__(
        self,
        starts: object,
        slots: object,
        checkpoint_rows: object,
        checkpoint_slots: object,
        isa: str | None = None,
    ) -> None:
        """
        int64: starts [n + 1], rising from 0; slots [n]; checkpoint_rows (rising) and checkpoint_slots [c]. All slots are distinct. isa: a variant's name, default the one in use.
        """

def recurrent_scan(
    step: RecurrenceStep,
    state: object,
    x: object,
    dt: object,
    a: object,
    b: object,
    c: object,
    d: object | None,
    out: object,
) -> None:
    """
    Mamba 1 of a state [slots, channels, size], Mamba 2 of [slots, heads, head_dim, size], float32; x, b, c and out of one type, dt, a and d of float32. Shapes: quire.recurrence.recurrence_backend.
    """

def recurrent_delta(
    step: RecurrenceStep,
    state: object,
    q: object,
    k: object,
    v: object,
    g: object,
    beta: object | None,
    scale: float,
    normalize: bool,
    out: object,
) -> None:
    """
    Gated delta rule and KDA of a state [slots, heads, k_dim, v_dim], float32; q, k, v and out of one type, g and beta of float32. Without beta linear attention, with g [heads].
    """

def recurrent_lru(
    step: RecurrenceStep, state: object, x: object, log_a: object, first: object | None, out: object
) -> None:
    """
    RG-LRU of a state [slots, channels], float32; x and out of one type, log_a of float32; first: uint8 [rows] or None.
    """

def short_convolution(
    step: RecurrenceStep,
    state: object,
    x: object,
    weight: object,
    bias: object | None,
    silu: bool,
    out: object,
) -> None:
    """
    Causal convolution of each channel, state [slots, width - 1, channels] of float32; x and out of one type, weight [channels, width] and bias [channels] of float32.
    """

class MixerBlock:
    """The mixer half of a state layer. It keeps alive what it is made of."""

    def __init__(
        self,
        kind: str,
        around: Surroundings,
        inputs: Sequence[tuple[PackedWeight, object]],
        columns: Sequence[Sequence[tuple[int, int, int]]],
        convolution: object,
        convolution_bias: object | None,
        heads: tuple[int, int, int, int],
        rate: object | None,
        shift: object | None,
        skip: object | None,
        limits: tuple[float, float],
        factor: float,
        norm: object | None,
        epsilon: float,
        norm_width: int,
        gates_first: bool,
        output: PackedWeight,
        output_bias: object | None,
    ) -> None:
        """
        kind: delta, scan, or convolution, which has neither steps nor a norm: b * x, convolved, times the gate. inputs: weight and bias (or None) of each product. columns: of x (q, k, v or x, b, c), gate, a and b, each a list of (product, column, width). convolution: float32 [channels, width]. heads: their number, their size, that of a key or a state, and the number of heads of q and k, or groups of b and c. rate, shift, skip: float32 [heads]. limits: of a step (scan). factor: of sigmoid(b) (delta). norm: float32, which repeats along a row; norm_width: elements normed together.
        """

    def run(
        self, step: RecurrenceStep, convolution: object, state: object | None, hidden: object, out: object
    ) -> None:
        """
        out [rows, width] of hidden [rows, width], which it may be; states, float32 [slots, ...], of the step's slots are updated.
        """
