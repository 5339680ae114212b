"""Encodes one block as one .safetensors file. docs/formats.md has the layout.

The file is written by the safetensors package. It is read here: everything about it is checked before an
array is made, and the arrays are views of the bytes as they were read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from mixedkv.kv.block import KVBlock
from mixedkv.store.entry_row import EntryError

FORMAT = "mixedkv.block"
VERSION = "4"
_MAX_HEADER = 1 << 24  # 0.2% of what an entry of 8 GiB takes; a layer needs some 600 bytes
_MAX_DIM = 1 << 40
_DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "F16": np.dtype("<f2"), "U8": np.dtype("u1")}
_NO_CHECKSUM = "0" * 64


def encode(block: KVBlock, *, identity: bytes, entry: str) -> list[memoryview]:
    """Encode a block to the bytes of a file, buffer by buffer."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "identity": identity.hex(),
        "entry": entry,
        "block": json.dumps(block.describe(), separators=(",", ":")),
        "checksum": _NO_CHECKSUM,
    }
    arrays = {name: np.ascontiguousarray(array) for name, array in block.to_arrays().items()}
    data = save(arrays, metadata)
    at = _checksum_place(data[: 8 + int.from_bytes(data[:8], "little")], _NO_CHECKSUM)
    checksum = hashlib.sha256(data).hexdigest().encode()
    view = memoryview(data)
    return [view[:at], memoryview(checksum), view[at + len(checksum) :]]


def decode(
    data: npt.NDArray[np.uint8], *, identity: bytes | None, entry: str | None, trusted: bool = False
) -> KVBlock:
    """Decode the bytes of a file to a block, whose arrays are views of them.

    Args:
        data: the file, uint8 [size].
        identity, entry: what the file must be of; None takes any.
        trusted: the bytes are known to be unchanged (by decryption, for example), so the checksum is not
            computed.

    Raises:
        EntryError: the file cannot be used.
    """
    header_bytes, header = _read_header(data)
    metadata = _check_metadata(header.pop("__metadata__", None))
    if identity is not None and metadata["identity"] != identity.hex():
        raise EntryError("identity", "it was computed under another model, setting or tenant")
    if entry is not None and metadata["entry"] != entry:
        raise EntryError("identity", f"it is the file of entry {metadata['entry'][:64]!r}")
    if not trusted:
        _check_checksum(data, header_bytes, metadata["checksum"])
    arrays = dict(_arrays(header, data[8 + len(header_bytes) :]))
    try:
        return KVBlock.from_arrays(_parse(metadata["block"]), arrays)
    except ValueError as error:
        raise EntryError("damaged", str(error)) from error


def _read_header(data: npt.NDArray[np.uint8]) -> tuple[bytes, dict[str, Any]]:
    size = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or not 2 <= size <= min(_MAX_HEADER, len(data) - 8):
        _damaged(f"its header claims {size} of {len(data)} bytes")
    header_bytes = data[8 : 8 + size].tobytes()
    header = _parse(header_bytes)
    if not isinstance(header, dict):
        _damaged("its header is not an object")
    return header_bytes, header


def _check_metadata(metadata: Any) -> dict[str, str]:
    names = ("format", "version", "identity", "entry", "block", "checksum")
    if not isinstance(metadata, dict) or not all(isinstance(metadata.get(name), str) for name in names):
        _damaged("its metadata is not complete")
    if metadata["format"] != FORMAT:
        _damaged(f"its format is {metadata['format'][:64]!r}, not {FORMAT!r}")
    if metadata["version"] != VERSION:
        raise EntryError("version", f"its version is {metadata['version'][:64]!r}, not {VERSION}")
    return metadata


def _check_checksum(data: npt.NDArray[np.uint8], header: bytes, checksum: str) -> None:
    """Check the file's SHA-256, which is of the file with zeros in place of it: nothing is left out."""
    at = _checksum_place(header, checksum, begin=8)
    digest = hashlib.sha256(data[:at])
    digest.update(_NO_CHECKSUM.encode())
    digest.update(data[at + len(_NO_CHECKSUM) :])
    if digest.hexdigest() != checksum:
        _damaged("its checksum does not match")


def _checksum_place(header: bytes, checksum: str, begin: int = 0) -> int:
    """Return where in the file the checksum's digits are; `header` begins at byte `begin` of it.

    The text cannot be elsewhere too: quotes within JSON strings are escaped.
    """
    key = b'"checksum":"'
    text = key + checksum.encode(errors="replace") + b'"'
    if len(checksum) != len(_NO_CHECKSUM) or header.count(text) != 1:
        _damaged("it has no checksum")
    return begin + header.index(text) + len(key)


def _arrays(table: dict[str, Any], data: npt.NDArray[np.uint8]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield every tensor, and check that together they fill the data without a gap or an overlap."""
    tensors = sorted(_tensors(table), key=lambda tensor: tensor[3])
    end = 0
    for name, dtype, shape, (begin, stop) in tensors:
        if begin != end or stop > len(data):
            _damaged(f"tensor {name[:64]!r} lies at {begin} to {stop}, not at {end}")
        if stop - begin != math.prod(shape) * dtype.itemsize or begin % dtype.itemsize:
            _damaged(f"tensor {name[:64]!r} of shape {shape} does not fit bytes {begin} to {stop}")
        yield name, data[begin:stop].view(dtype).reshape(shape)
        end = stop
    if end != len(data):
        _damaged(f"its tensors end at {end} of {len(data)} bytes")


def _tensors(table: dict[str, Any]) -> Iterator[tuple[str, np.dtype[Any], list[int], tuple[int, int]]]:
    for name, tensor in table.items():
        if not isinstance(tensor, dict) or tensor.keys() != {"dtype", "shape", "data_offsets"}:
            _damaged(f"tensor {name[:64]!r} is not described")
        dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            _damaged(f"tensor {name[:64]!r} has the type {str(dtype)[:64]!r}")
        if not _are_sizes(shape, 1, 2) or not _are_sizes(offsets, 2, 2):
            _damaged(f"tensor {name[:64]!r} has no usable shape or offsets")
        yield name, _DTYPES[dtype], shape, (offsets[0], offsets[1])


def _are_sizes(values: Any, at_least: int, at_most: int) -> bool:
    return (
        isinstance(values, list)
        and at_least <= len(values) <= at_most
        and all(type(value) is int and 0 <= value < _MAX_DIM for value in values)
    )


def _parse(text: str | bytes) -> Any:
    """Parse JSON; refuse what JSON readers disagree about: keys given twice, NaN, endless nesting."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_damaged)
    except (ValueError, RecursionError) as error:
        raise EntryError("damaged", f"its header is not JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        _damaged("its header gives a key twice")
    return values


def _damaged(message: str) -> NoReturn:
    raise EntryError("damaged", message)
