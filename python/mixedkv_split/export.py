"""`mixedkv split export`: a model becomes two files, a head for clients and a body for servers.

The head has the token embeddings, the output matrix and the tokenizer. The body has the layers and the norm
after the last one; in place of the vocabulary it has one token without a name, whose embedding is zero, since
llama.cpp's loaders want a vocabulary. Any llama.cpp can load it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf

from mixedkv.errors import UnsupportedModelError
from mixedkv.model.fingerprint import fingerprint
from mixedkv.model.gguf_file import ModelFile, other_parts, read_model_file
from mixedkv_split.cloak import cloaked
from mixedkv_split.parts import (
    BODY,
    HEAD,
    HEAD_TENSORS,
    OUTPUT,
    OUTPUT_BIAS,
    PREFIX,
    TOKEN_EMBD,
    VERSION,
    Arithmetic,
    Tensor,
    arithmetic,
)

_SKIPPED = ("GGUF.", "split.", PREFIX)  # the reader's own fields; those of a model in several files


@dataclass(frozen=True, slots=True)
class Exported:
    """The two files and their sizes in bytes."""

    head: Path
    body: Path
    head_bytes: int
    body_bytes: int


def export(
    model: str | os.PathLike[str],
    head: str | os.PathLike[str],
    body: str | os.PathLike[str],
    cloak: int | None = None,
) -> Exported:
    """Write the head and the body of a GGUF model; both or none.

    Args:
        model: a GGUF file, of a split one the first part. Without a cloak nothing is converted.
        cloak: seed of a rotation of the hidden states, see `cloak`; all matrices become F32.

    Raises:
        UnsupportedModelError: this model cannot be split, or not cloaked.
        ValueError: the seed is negative.
        InvalidModelFileError: it is no GGUF file, or damaged.
        FileExistsError: there is a file where one is to be written.
        OSError: a file cannot be read or written.
    """
    file = read_model_file(model)
    if any(key.startswith(PREFIX) for key in file.metadata):
        raise UnsupportedModelError(f"{file.path} is a part of a split model already: export the whole model")
    source = _Source(file)
    numbers = arithmetic(file, set(source.tensors))
    pair = fingerprint(model)
    if cloak is not None:
        if cloak < 0:
            raise ValueError(f"cloak={cloak}: use a seed of 0 or more")
        source.tensors = cloaked(source.tensors, cloak, model)
        pair = hashlib.sha256(f"{pair} cloak {cloak}".encode()).hexdigest()
    head, body = Path(head), Path(body)
    for path in (head, body):
        if path.exists():
            raise FileExistsError(17, "there is a file already: remove it, or write elsewhere", str(path))
    written: list[Path] = []
    try:
        written.append(_write(head, source, _head_keys(source, numbers), pair[:32], HEAD, source.head()))
        written.append(_write(body, source, _body_keys(source), pair[:32], BODY, source.body()))
        for part, path in zip(written, (head, body), strict=True):
            os.replace(part, path)
    except BaseException:
        for path in [*written, head] if len(written) == 2 else written:
            path.unlink(missing_ok=True)
        raise
    return Exported(head, body, head.stat().st_size, body.stat().st_size)


_Key = tuple[str, Any, gguf.GGUFValueType, gguf.GGUFValueType | None]


class _Source:
    """A model's keys and tensors, mapped into memory."""

    def __init__(self, file: ModelFile) -> None:
        self.architecture, self._width = file.architecture, file.get("embedding_length")
        readers = [gguf.GGUFReader(path) for path in (file.path, *other_parts(file))]
        self._fields = readers[0].fields
        self.tensors = {tensor.name: Tensor.of(tensor) for reader in readers for tensor in reader.tensors}
        self._names = tuple(self.tensors)  # a cloaked head has an output matrix in any case

    def metadata(self) -> Iterable[_Key]:
        for name, field in self._fields.items():
            if not name.startswith(_SKIPPED) and name != gguf.Keys.General.ARCHITECTURE:
                kind = field.types[0]
                sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                yield name, field.contents(), kind, sub

    def head(self) -> list[Tensor]:
        return [self.tensors[name] for name in HEAD_TENSORS if name in self.tensors]

    def body(self) -> list[Tensor]:
        """Return the body's tensors. What the head has is replaced by stand-ins: one token, all zeros."""
        shapes = {TOKEN_EMBD: (1, self._width), OUTPUT: (1, self._width), OUTPUT_BIAS: (1,)}
        return [
            Tensor.zeros(name, *shapes[name]) if name in shapes else self.tensors[name]
            for name in self._names
        ]


def _head_keys(source: _Source, numbers: Arithmetic) -> Iterable[_Key]:
    yield from source.metadata()
    for name, value in asdict(numbers).items():
        yield PREFIX + name, value, gguf.GGUFValueType.FLOAT32, None


def _body_keys(source: _Source) -> Iterable[_Key]:
    size = f"{source.architecture}.vocab_size"
    for key in source.metadata():
        if not key[0].startswith("tokenizer.") and key[0] != size:
            yield key
    yield "tokenizer.ggml.model", "none", gguf.GGUFValueType.STRING, None
    yield size, 1, gguf.GGUFValueType.UINT32, None


def _write(
    path: Path, source: _Source, keys: Iterable[_Key], pair: str, part: str, tensors: list[Tensor]
) -> Path:
    """Write a file under another name, until its last byte is on the disk."""
    unfinished = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(unfinished, source.architecture)
    try:
        for name, value, kind, sub in keys:
            writer.add_key_value(name, value, kind, sub_type=sub)
        writer.add_uint32(PREFIX + "version", VERSION)
        writer.add_string(PREFIX + "part", part)
        writer.add_string(PREFIX + "pair", pair)
        for tensor in tensors:
            writer.add_tensor_info(
                tensor.name, tensor.shape, tensor.dtype, tensor.nbytes, raw_dtype=tensor.kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.read())
        writer.flush()
        writer.close()
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
    except BaseException:
        writer.close()
        unfinished.unlink(missing_ok=True)
        raise
    return unfinished
