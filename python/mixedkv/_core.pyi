"""Private mirror of the C API, cpp/include/mixedkv/mixedkv.h. `ctx` and `model` are addresses.

Statuses become exceptions: INVALID ValueError, UNSUPPORTED errors.UnsupportedModelError,
NOT_AVAILABLE LookupError, UNREADABLE errors.ModelReadError, INTERNAL RuntimeError.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypedDict

import numpy as np
import numpy.typing as npt

class Version(TypedDict):
    version: str
    llama_commit: str
    isa: str

class Stats(TypedDict):
    mixed: bool
    n_ctx_seq: int
    n_seq_max: int
    n_stream: int
    n_layer: int
    threshold: int
    threshold_capacity: int
    group_size: int
    sink_tokens: int
    n_draft: int
    ring_rows: int
    n_cells_used: int
    n_cells_hot: int
    hot_slots: int
    hot_shared: bool
    n_evicted: int
    n_pages: int
    n_pages_read: int
    n_elements: int
    bytes_total: int
    bytes_cold: int
    bytes_hot: int
    bytes_given_back: int
    bytes_view: int
    bytes_compute: int

class Layer(TypedDict):
    il: int
    mixed: bool
    fused: bool
    on_device: bool
    in_place: bool
    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    n_cells: int
    type_k: int
    type_v: int
    rotation_k: int
    rotation_v: int
    equalization: int
    group: int
    bytes_cold: int
    bytes_hot: int
    n_swa: int

class Sequence(TypedDict):
    seq_id: int
    pos_min: int
    pos_max: int
    hot_begin: int
    n_hot: int
    n_cold: int
    short_from: int

class LayerRows(TypedDict):
    il: int
    n_head_kv: int
    head_size_k: int
    head_size_v: int
    type_k: int
    type_v: int
    rotation_k: int
    rotation_v: int
    equalization: int
    k: npt.NDArray[np.uint8]
    v: npt.NDArray[np.uint8]
    k_hot: npt.NDArray[np.float16]
    v_hot: npt.NDArray[np.float16]

class StreamStats(TypedDict):
    bytes_read: int
    n_layers: int
    n_holds: int
    n_stalls: int
    seconds_waiting: float
    seconds_reading: float
    bytes_ring: int
    bytes_streamed: int
    o_direct: bool
    n_passes: int
    seconds: float

class RowGroup(TypedDict):
    positions: npt.NDArray[np.int32]
    hot: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    layers: list[LayerRows]

def version() -> Version: ...
def last_error() -> str: ...

class CacheConfig:
    """How the next context keeps its KV: `mixedkv_config` of mixedkv.h, where each field is explained."""

    HOT_BUDGET_AUTO: ClassVar[int]
    HOT_BUDGET_ALL: ClassVar[int]

    def __init__(
        self,
        *,
        mixed: bool = True,
        threshold: int = 0,
        group_size: int = 1,
        sink_tokens: int = 0,
        attention: str = "auto",
        n_draft: int = 0,
        hot_budget: int = ...,
        sparse_error: float = 0.0,
        layers: list[tuple[int, int, int, int]] = ...,
    ) -> None: ...
    @property
    def chooses_rows(self) -> bool:
        """False where the number of F16 rows is given: no size is too large then."""

    @staticmethod
    def of(mixed: bool, fields: dict[str, Any]) -> CacheConfig:
        """Make one of the fields of a setting by name, as `check_kv` takes them."""

COLD_TYPES: tuple[str, ...]
UNIFORM_TYPES: tuple[str, ...]
PRESETS: tuple[str, ...]
DEFAULTS: dict[str, Any]
UNIFORM_DEFAULTS: dict[str, Any]
DRAFTS_KEPT: int

def parse_kv(text: str) -> tuple[bool, dict[str, Any]]:
    """Read a spec: whether the cache is mixed, and its fields by name."""

def check_kv(mixed: bool, fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields in their normal form, those left out with their defaults. Raises ValueError."""

def format_kv(mixed: bool, fields: dict[str, Any], full: bool = False) -> str:
    """Return the spec that `parse_kv` reads back."""

def layer_ranges(layers: str) -> list[tuple[int, int, str, str]]:
    """Return first and last layer (-1: the model's) of each range, and its types of K and V."""

def row_types() -> dict[str, tuple[int, int, int]]:
    """Return ggml's id of each type that a cache can have, and the elements and bytes of a block."""

def parse_size(text: str, unit: int = 1) -> int: ...

class HotWindow:
    """The rule that says which positions attention reads in F16: see cpp/hot_set/hot_window.h.

    What a cache promises. Which rows it has is another matter: F16 rows can make room for those of other
    sequences, and a block that was loaded has those of its own window only. `KVCache.holds` looks at them.
    """

    def __init__(
        self, threshold: int = 0, group_size: int = 1, sink_tokens: int = 0, n_draft: int = 0
    ) -> None: ...
    @property
    def threshold(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def sink_tokens(self) -> int: ...
    @property
    def n_draft(self) -> int: ...
    def begin(self, q: int) -> int:
        """Return the first position of the recent window of a query at position `q`."""

    def contains(self, p: int, q: int) -> bool:
        """Return whether the query at position `q` reads the key at position `p` in F16."""

    def held_begin(self, q: int) -> int:
        """Return the first position of the recent rows that a sequence holds whose last token is at `q`."""

    def cut_is_exact(self, n: int, at: int) -> bool:
        """Return whether a sequence of `n` tokens, cut or copied at `at`, can go on as if it had never been
        longer.
        """

    def rows(self) -> int:
        """Return the number of F16 rows that a sequence can hold."""

def configure_next(config: CacheConfig) -> None: ...
def withdraw() -> None: ...
def check(model: int, config: CacheConfig, type_k: int, type_v: int, n_ctx: int) -> None: ...
def count_ring_rows(
    config: CacheConfig, n_seq: int, n_cells: int, bytes_cold: int, bytes_f16: int
) -> tuple[int, int]: ...
def gpus_read(
    type_k: int, type_v: int, n_embd_head_k: int, n_embd_head_v: int, n_head: int, n_head_kv: int
) -> bool: ...
def stats(ctx: int) -> Stats: ...
def layers(ctx: int) -> list[Layer]: ...
def scales(ctx: int, il: int) -> npt.NDArray[np.float32] | None: ...
def sequences(ctx: int) -> list[Sequence]: ...
def short_from(ctx: int) -> list[int]: ...
def window_is_whole(ctx: int, seq: int, pos: int) -> bool: ...
def find_cut(ctx: int, seq: int, n: int) -> tuple[int, int, int, int, bool]: ...
def release_hot_rows(ctx: int, seq: int) -> None: ...
def hold_hot_rows(ctx: int, seq: int) -> None: ...
def limit_sliding(n_windows: int) -> None: ...
def drop_sliding(ctx: int, seq: int) -> None: ...
def bits_problem(ctx: int) -> str: ...
def check_pages(ctx: int) -> tuple[int, int]: ...
def set_window(ctx: int, threshold: int, group_size: int, sink_tokens: int) -> None: ...
def read_rows(
    ctx: int, il: int, seq: int, which: Literal["k", "v"], p0: int, p1: int, unrotate: bool
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.bool_]]: ...
def check_rows(ctx: int) -> None: ...
def count_computed(ctx: int, seq: int, p0: int, tokens: npt.NDArray[np.int32]) -> int: ...
def get_validity(ctx: int, seq: int, p0: int, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]: ...
def get_past(ctx: int, seq: int, p0: int, n: int) -> npt.NDArray[np.uint64]: ...
def get_setting(ctx: int, seq: int, p: int) -> str: ...
def name_model(ctx: int, name: str) -> None: ...
def extend_past(past: int, tokens: npt.NDArray[np.int32]) -> int: ...
def set_validity(
    ctx: int, seq: int, p0: int, past: int, tokens: npt.NDArray[np.int32], validity: int, setting: str
) -> None: ...
def limit_validity(ctx: int, seq: int, p0: int, p1: int, validity: int) -> None: ...
def refused(ctx: int) -> str: ...
def read_tiers(
    ctx: int, il: int, seq: int, p0: int, p1: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]: ...
def export_rows(ctx: int, seq: int, p0: int, p1: int) -> list[RowGroup]: ...
def import_rows(ctx: int, seq: int, groups: list[dict[str, Any]], shift: int, drop_from: int) -> None: ...
def fill(
    ctx: int,
    seq: int,
    tokens: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    logits: bool,
    last_layer: int,
    n_mass: int,
) -> npt.NDArray[np.float32]: ...
def import_part(ctx: int, seq: int, groups: list[dict[str, Any]]) -> None: ...
def restore_window(ctx: int, seq: int, groups: list[dict[str, Any]]) -> None: ...

class Turn:
    """A thread's stay in a `Gate`, for `with`; a thread may enter again."""

    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...

class Gate:
    """The way into a context, which it outlives: one thread at a time uses the context, and it is not freed
    while any is inside. All raise errors.ClosedError once it refuses, but not on threads that are inside."""

    def __init__(self) -> None: ...
    def open(self, ctx: int) -> None:
        """From now on who takes the context holds its own lock, which the C API looks at, too."""
    def present(self) -> Turn:
        """Other threads may use the context, but it is not freed."""
    def waiting(self) -> Turn:
        """No other thread uses the context: waits for that. The handlers of signals run meanwhile."""
    def at_once(self, what: str) -> Turn:
        """No other thread uses the context: errors.ContextBusyError, which names `what`, where one does."""
    def refuse(self) -> None:
        """Let nobody in any more; who waits leaves."""
    def shut(self) -> None:
        """Refuse, and wait until all have left. RuntimeError on a thread that is inside."""
    @property
    def refuses(self) -> bool: ...
    @property
    def inside(self) -> bool:
        """Whether this thread is inside."""
    @property
    def empty(self) -> bool:
        """No thread is inside."""

class Interrupt:
    """Ends an evaluation between two nodes of its graph: llama_decode then returns 2. It looks for signals on
    Python's main thread, and must live as long as the context."""

    def __init__(self, ctx: int) -> None: ...
    def watch(self, on: bool) -> None:
        """Set whether graphs can be ended half-way; at first they cannot."""

    def ask(self) -> None:
        """End the evaluation that runs, or the next one, and all until `clear` or `take`."""
    def clear(self) -> None: ...
    def take(self) -> bool:
        """Whether it was asked for, once. Raises what the handler of a signal raised, if that was why."""

def log_functions() -> tuple[int, int]:
    """Addresses of ggml_log_callback functions: one that writes as llama_cpp does, with its logger as user
    data, and one that writes nothing."""

class Threads:
    """CPU threads for a context, as many as it is set to; close them before it."""

    def __init__(self, ctx: int) -> None: ...
    def close(self) -> None: ...

class Matrix:
    """A matrix of a GGUF file as it lies in memory, [n_rows, n_in], of a ggml type; for one thread at a time.
    The arithmetic is llama.cpp's on a CPU.
    """

    def __init__(self, data: Any, type: int, n_in: int, n_rows: int, n_threads: int) -> None: ...
    def rows(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]: ...
    def multiply(self, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...

class Loading:
    """A model on its way, for llama_model_params. `progress` gets the share that is there."""

    def __init__(self, progress: Callable[[float], object] | None) -> None: ...
    def callback(self) -> int: ...
    def address(self) -> int: ...
    def check(self) -> None:
        """Raises what ended it: what Ctrl-C's handler raised, or `progress`."""

class Assertions:
    """While inside, an assertion of ggml that fails on this thread makes the function that was called fail;
    elsewhere it ends the process. For functions that load a model or make a context."""

    def __init__(self) -> None: ...
    def __enter__(self) -> Assertions: ...
    def __exit__(self, *args: object) -> None: ...
    @property
    def failed(self) -> str:
        """What ggml says of it, with its place in ggml or llama.cpp; "" if none failed."""

class Stream:
    """Weights that are read for each pass; buffer_type: an address, for llama_model_params."""

    def __init__(self, prefetch: bool, n_slots: int, n_threads: int, chunk: int) -> None: ...
    def buffer_type(self) -> int: ...
    def stats(self) -> StreamStats: ...
    def check(self) -> None:
        """Raises errors.ModelReadError, or what Ctrl-C's handler raised, once after a failed evaluation."""
    def lock(self, model: int) -> tuple[int, int, str]:
        """Bytes that are locked, that should be, and why not all are."""

def take_not_finite(context: int) -> dict[int, int]:
    """Sequences whose evaluation gave values that are no numbers since the last call; where they begin."""

def clear_unused(context: int) -> None:
    """Zero what cells hold that no sequence has."""

def want_logits(context: int, tokens: npt.NDArray[np.uint32] | None) -> None:
    """Of the next evaluations the logits of these tokens are read, a bit each; None: all."""

def keep_hidden(context: int, value: bool, outputs_only: bool) -> None:
    """Have a context keep the hidden states behind its last layer: of all tokens of a batch, or of those with
    logits."""

def hidden(context: int, first: int, n: int) -> npt.NDArray[np.float32]:
    """Of `n` tokens of the latest batch, [n, n_embd]."""

def mapped_weights(model: int) -> list[tuple[int, int]]:
    """(address, bytes) of each weight that is read where the model's file is mapped, not from a buffer."""
