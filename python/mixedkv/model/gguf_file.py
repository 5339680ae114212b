"""A look at a GGUF file before anything native opens it: one clear error for what cannot be loaded.

The format is on one page: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Sizes in a file are
claims: each has a limit, and nothing is allocated that the file has no bytes for.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mixedkv.errors import InvalidModelFileError
from mixedkv.limits import INT32_MAX

DEFAULT_N_CTX = 8192

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 1 << 20
_MAX_TENSORS = 1 << 20
_MAX_STRINGS = 1 << 24  # in one array; the largest vocabularies have 2^18
_MAX_KEY = 1 << 16
_MAX_TEXT = 1 << 24
_MAX_KEPT = 1 << 14  # array elements; longer arrays are stepped over: the tokenizer's
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32  # where a file names none
# llama.cpp's llama_model_rope_type has these without RoPE; granitehybrid has it in some files only
_WITHOUT_ROPE = frozenset({
    "arwkv7", "bloom", "gpt2", "gptj", "granitehybrid", "jais", "jamba", "jina-bert-v2", "kimi-linear",
    "mamba", "mamba2", "mpt", "nemotron_h", "nemotron_h_moe", "refact", "rwkv6", "rwkv6qwen2", "rwkv7", "t5",
    "t5encoder", "wavtokenizer-dec",
})  # fmt: skip
_SPLIT_NAME = re.compile(r"^(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.S)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor in a model's file.

    Attributes:
        shape: as ggml has it, the dimension that lies together in memory first.
        kind: the number of its ggml type.
        n_bytes: of its data; 0 of a type that only a later gguf package knows.
        start: the byte of its file at which its data begin.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    n_bytes: int
    start: int


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Facts from the header of a GGUF file.

    Attributes:
        path: the file, for a split model its first part.
        metadata: keys and values without strings in arrays and arrays too long to be about layers.
        n_tensors: tensors in this file.
        size: bytes of all parts.
        tensors: of all parts.
    """

    path: Path
    metadata: dict[str, Any]
    n_tensors: int
    size: int
    tensors: tuple[TensorFacts, ...] = ()

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of an architecture's own key, e.g. "block_count" for "llama.block_count"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def default_n_ctx(file: ModelFile) -> int:
    """Return the tokens of a context where no number is given: 8192, or the model's if that is less."""
    return min(DEFAULT_N_CTX, int(file.get("context_length", 0)) or DEFAULT_N_CTX)


def n_mtp_layers(file: ModelFile) -> int:
    """Return how many of the last layers only guess further tokens (multi-token prediction)."""
    n = file.get("nextn_predict_layers", 0)
    return n if isinstance(n, int) else 0


@cache
def _type_sizes() -> dict[int, tuple[int, int]]:
    """Return the elements and bytes of a block of each of ggml's types, by the type's id."""
    import gguf  # takes a while

    return {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}


def weight_type(file: ModelFile) -> str:
    """Return the type of most weights as the file names it, `Q4_K_M`, or "unknown"."""
    import gguf  # takes a while

    try:
        return gguf.LlamaFileType(file.metadata.get("general.file_type", -1)).name.removeprefix("MOSTLY_")
    except ValueError:
        return "unknown"


def n_layers(file: ModelFile) -> int:
    """Return how many layers each token goes through; 0 where the file does not tell."""
    n = file.get("block_count", 0)
    return max(0, n - n_mtp_layers(file)) if isinstance(n, int) else 0


def file_stamp(path: str | os.PathLike[str]) -> tuple[int, int, int, int]:
    """Changes when the file is replaced or written to: device, inode, size, time of the last change."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_model_file(path: str | os.PathLike[str]) -> ModelFile:
    """Read and check the header of a GGUF file, and of the other parts of a split one.

    Raises:
        FileNotFoundError: there is no such file.
        InvalidModelFileError: it is no GGUF file, is truncated, or a size in it cannot be right.
        OSError: it cannot be read.
    """
    first = _read_part(Path(path))
    others = [_read_part(part) for part in other_parts(first)]
    size = first.size + sum(part.size for part in others)
    tensors = sum((part.tensors for part in others), first.tensors)
    model = ModelFile(first.path, first.metadata, first.n_tensors, size, tensors)
    _check_kinds(model)
    _check_floats(model)
    _check_sizes(model)
    _check_rope(model)
    return model


def _refuse(model: ModelFile, why: str) -> NoReturn:
    raise InvalidModelFileError(f"{model.path} cannot be loaded: {why}")


# of an architecture, which llama.cpp takes of a whole number's type only; of some one for each layer
_INTEGERS = (
    "block_count", "context_length", "embedding_length", "vocab_size", "nextn_predict_layers",
    "pooling_type", "attention.key_length", "attention.value_length", "attention.key_length_swa",
    "attention.value_length_swa", "attention.key_length_mla", "attention.value_length_mla",
    "attention.shared_kv_layers", "attention.sliding_window", "full_attention_interval",
    "vision.image_size", "vision.patch_size", "vision.embedding_length", "vision.feed_forward_length",
)  # fmt: skip
_INTEGERS_BY_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_kinds(model: ModelFile) -> None:
    """Refuse values of another type than the one that is read: llama.cpp would, and what is computed before
    it loads the file would fail.
    """
    for name in (*_INTEGERS, *_INTEGERS_BY_LAYER):
        value = model.get(name)
        listed = value if isinstance(value, list) and name in _INTEGERS_BY_LAYER else [value]
        if value is not None and not (listed and all(map(_is_int, listed))):
            _refuse(model, f"its {name} is {value!r:.80}: it must be a whole number")
    if not isinstance(causal := model.get("attention.causal", True), bool):
        _refuse(model, f"its attention.causal is {causal!r:.80}: it must be true or false")


def _check_floats(model: ModelFile) -> None:
    """Refuse hyperparameters that are NaN, and epsilons of norms at which ggml ends the process."""
    for key, value in model.metadata.items():
        name = key.removeprefix(f"{model.architecture}.")
        numbers = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, float)]
        if name == key or not numbers:
            continue
        if any(math.isnan(x) for x in numbers):
            _refuse(model, f"its {name} is {value}, not a number")
        if name.endswith("epsilon") and not all(0 <= x <= 1 for x in numbers):
            _refuse(model, f"its {name} is {value}; a norm's epsilon is from 0 to 1")


_LARGEST = {"block_count": 1 << 16, "context_length": INT32_MAX}  # no model is near them


def _check_sizes(model: ModelFile) -> None:
    """Refuse whole numbers at which llama.cpp divides by zero or ggml ends the process."""
    for name, most in _LARGEST.items():
        if isinstance(n := model.get(name), int) and not 0 <= n <= most:
            _refuse(model, f"its {name} is {n}: it must be from 0 to {most}")
    at_least_1 = ["full_attention_interval"]
    if model.architecture == "llama4":
        at_least_1.append("attention.sliding_window")
    for name in at_least_1:
        if model.get(name) == 0:
            _refuse(model, f"its {name} is 0: it must be 1 or more")
    if isinstance(wkv := model.get("wkv.head_size"), int) and wkv % 32:
        _refuse(model, f"its wkv.head_size is {wkv}: it must be a multiple of 32")
    scale, length = model.get("attention.temperature_scale"), model.get("attention.temperature_length")
    if model.architecture == "deepseek2" and scale and not length:  # it grows in steps of no length
        _refuse(
            model,
            f"its attention.temperature_scale is {scale}, and its attention.temperature_length is {length}: "
            f"it must be 1 or more",
        )
    n_layer, n_mtp = model.get("block_count"), n_mtp_layers(model)
    if n_mtp and isinstance(n_layer, int) and n_mtp >= n_layer:
        _refuse(
            model,
            f"{n_mtp} of its {n_layer} layers guess further tokens (nextn_predict_layers), and none are left",
        )


def _check_rope(model: ModelFile) -> None:
    """Refuse a RoPE that cannot turn pairs of a head's elements: ggml would end the process, or hang."""
    least = 0 if model.architecture in _WITHOUT_ROPE else 2
    width, n_head = model.get("embedding_length"), model.get("attention.head_count")
    size = width // n_head if isinstance(width, int) and isinstance(n_head, int) and n_head else None
    sections = model.get("rope.dimension_sections")
    elements = model.get("attention.key_length", size)
    if (
        isinstance(sections, list)
        and isinstance(elements, int)
        and (not sections or min(sections) < 0 or not any(sections[:3]) or sum(sections) > elements)
    ):
        _refuse(
            model,
            f"its rope.dimension_sections are {sections}; they must be 0 or more, not all 0, and {elements} "
            f"together at most",
        )
    for end in ("", "_swa"):
        n_rot = model.get(f"rope.dimension_count{end}")
        head = model.get(f"attention.key_length{end}", model.get("attention.key_length", size))
        most = head if isinstance(head, int) else n_rot
        if isinstance(n_rot, int) and (n_rot % 2 or not least <= n_rot <= most):
            _refuse(
                model,
                f"its rope.dimension_count{end} is {n_rot}, and RoPE turns pairs of the {head} elements of a "
                f"head",
            )


def _read_part(path: Path) -> ModelFile:
    mode = path.stat().st_mode  # FileNotFoundError names the path itself
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise InvalidModelFileError(f"{path} is {kind}: a GGUF model file is needed")
    with path.open("rb", buffering=1 << 18) as file:
        return Reader(path, file).read()


def other_parts(first: ModelFile) -> Iterator[Path]:
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return
    name = _SPLIT_NAME.match(first.path.name)
    if name is None or int(name["count"]) != count:
        raise InvalidModelFileError(
            f"{first.path} is one of {count} parts: its name must end in -00001-of-{count:05d}.gguf"
        )
    if int(name["no"]) != 1:
        raise InvalidModelFileError(
            f"{first.path} is part {name['no']} of a split model: give its part 00001"
        )
    for no in range(2, count + 1):
        part = first.path.with_name(f"{name['prefix']}-{no:05d}-of-{count:05d}.gguf")
        if not part.exists():
            raise InvalidModelFileError(f"{first.path} has {count} parts, but {part.name} is not beside it")
        yield part


class Reader:
    """Reads one header from front to back."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.alignment = _ALIGNMENT

    def read(self) -> ModelFile:
        self._check_magic()
        version, n_tensors, n_keys = self._unpack("<IQQ")
        if version not in _VERSIONS:
            self._fail(f"it has GGUF version {version}; versions 2 and 3 in little-endian order can be read")
        if n_keys > _MAX_KEYS or n_tensors > _MAX_TENSORS:
            self._fail(f"its header claims {n_keys} keys and {n_tensors} tensors")
        pairs = [self._pair() for _ in range(n_keys)]
        metadata = {key: value for key, value in pairs if value is not None}
        self.alignment = self._alignment(metadata)
        tensors = self._read_tensors(n_tensors)
        return ModelFile(self.path, metadata, n_tensors, self.size, tensors)

    def _check_magic(self) -> None:
        magic = self.file.read(len(_MAGIC))
        if not magic:
            self._fail("it is empty")
        if magic != _MAGIC:
            self._fail(f"it is no GGUF file: it starts with {magic!r} instead of {_MAGIC!r}")

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", self.alignment)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"its general.alignment is {alignment!r}, not a power of two")
        return alignment

    def _read_tensors(self, n_tensors: int) -> tuple[TensorFacts, ...]:
        read = [self._tensor() for _ in range(n_tensors)]
        data = pad(self.file.tell(), self.alignment)
        tensors = tuple(replace(tensor, start=data + tensor.start) for tensor in read)
        end, name = max(((t.start + t.n_bytes, t.name) for t in tensors), default=(0, ""))
        if end > self.size:
            self._fail(f"it is truncated: tensor {name!r} ends at byte {end}, the file at {self.size}")
        return tensors

    def _tensor(self) -> TensorFacts:
        """Return a tensor whose `start` is counted from the first byte of all tensors' data."""
        name = self._string(_MAX_KEY)
        (n_dims,) = self._unpack("<I")
        if n_dims > 4:
            self._fail(f"its tensor {name!r} has {n_dims} dimensions")
        shape = self._unpack(f"<{n_dims}Q")
        kind, offset = self._unpack("<IQ")
        return TensorFacts(name, shape, kind, _tensor_bytes(kind, math.prod(shape)), offset)

    def _pair(self) -> tuple[str, Any]:
        key = self._string(_MAX_KEY)
        (kind,) = self._unpack("<I")
        return key, self._array(key) if kind == _ARRAY else self._value(key, kind)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(_MAX_TEXT)
        if kind not in _SCALARS:
            self._fail(f"its key {key!r} has the unknown type {kind}")
        return self._unpack("<" + _SCALARS[kind])[0]

    def _array(self, key: str) -> list[Any] | None:
        kind, n = self._unpack("<IQ")
        if kind == _STRING:
            self._skip_strings(key, n)
            return None
        if kind not in _SCALARS:
            self._fail(f"its key {key!r} is an array of the unknown type {kind}")
        if n > _MAX_KEPT:
            self._skip(n * struct.calcsize(_SCALARS[kind]))
            return None
        return list(self._unpack(f"<{n}{_SCALARS[kind]}"))

    def _skip_strings(self, key: str, n: int) -> None:
        if n > _MAX_STRINGS:
            self._fail(f"its key {key!r} claims {n} strings")
        read, seek, length = self.file.read, self.file.seek, struct.Struct("<Q")
        for _ in range(n):
            head = read(8)
            if len(head) < 8:
                self._truncated()
            (size,) = length.unpack(head)
            if size > _MAX_TEXT:
                self._fail(f"its key {key!r} claims a string of {size} bytes")
            seek(size, os.SEEK_CUR)
        self._skip(0)

    def _string(self, limit: int) -> str:
        (size,) = self._unpack("<Q")
        if size > limit:
            self._fail(f"it claims a name or text of {size} bytes near byte {self.file.tell()}")
        return self._take(size).decode("utf-8", errors="replace")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, size: int) -> bytes:
        data = self.file.read(size)
        if len(data) < size:
            self._truncated()
        return data

    def _skip(self, size: int) -> None:
        if self.file.tell() + size > self.size:
            self._truncated()
        self.file.seek(size, os.SEEK_CUR)

    def _truncated(self) -> NoReturn:
        self._fail(f"it is truncated: its header does not end within its {self.size} bytes")

    def _fail(self, reason: str) -> NoReturn:
        raise InvalidModelFileError(f"{self.path} cannot be loaded: {reason}")


def _tensor_bytes(kind: int, n_elements: int) -> int:
    """Return the bytes of a tensor; 0 for a type that only a later gguf package knows, which is left to
    llama.cpp.
    """
    block, size = _type_sizes().get(kind, (1, 0))
    return n_elements // block * size


def pad(n: int, alignment: int) -> int:
    return (n + alignment - 1) // alignment * alignment
