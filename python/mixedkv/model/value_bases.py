"""The bases that a model stores its values in: how they are found, and the file that keeps them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from mixedkv.errors import InvalidModelFileError
from mixedkv.model.fingerprint import fingerprint
from mixedkv.model.gguf_file import read_model_file

log = logging.getLogger("mixedkv")

ARCHITECTURE = "mixedkv-value-bases"
VERSION = 1
BLOCK = 64  # elements of lm3, of which each block has a mix of directions
# What the best levels of 5 to 0 bits leave of a Gaussian number's variance, by element of a block
_ERRORS = np.repeat([0.0025, 0.0095, 0.0345, 0.1175, 0.3634, 1.0], [8, 8, 16, 16, 8, 8])
_LEAST = 1e-3  # of the largest scale: what hardly varies is no reason for larger numbers

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ValueBasis:
    """Of one layer: orthonormal `directions` [n_head_kv, head, head], a row each, and the standard deviation
    of values along them, `scales` [n_head_kv, head]. In each block of 64 they are of falling variance.
    """

    directions: Floats
    scales: Floats

    @classmethod
    def of(cls, moments: npt.NDArray[np.float64]) -> ValueBasis:
        """From the mean of v v^T over the values v of a layer, [n_head_kv, head, head]."""
        variance, vectors = np.linalg.eigh(moments)
        n_blocks = max(1, moments.shape[-1] // BLOCK)
        order = np.arange(moments.shape[-1])[::-1].reshape(-1, n_blocks).T.ravel()
        scales = np.sqrt(np.maximum(variance[:, order], 0.0))
        largest = scales.max(axis=1, keepdims=True)
        scales = np.where(largest > 0, np.maximum(scales, _LEAST * largest), 1.0)
        directions = vectors[:, :, order].transpose(0, 2, 1)
        return cls(np.ascontiguousarray(directions, np.float32), scales.astype(np.float32))

    @property
    def error(self) -> float:
        """Mean squared error of values in lm3 over their mean square, as if they were Gaussian."""
        power = self.scales.astype(np.float64) ** 2
        return float((power @ np.resize(_ERRORS, power.shape[1])).sum() / power.sum())

    def problem(self) -> str:
        """What is wrong with it, "" for nothing."""
        n = self.directions.shape[-1]
        if self.directions.shape != (len(self.scales), n, n) or self.scales.shape[1:] != (n,):
            return "its tensors do not fit each other"
        if not (np.isfinite(self.directions).all() and np.isfinite(self.scales).all()):
            return "it has numbers that are not finite"
        if not ((self.scales > 1e-20) & (self.scales < 1e20)).all():
            return "a scale is not positive"
        squares = self.directions.astype(np.float64) @ self.directions.transpose(0, 2, 1)
        return "" if np.abs(squares - np.eye(n)).max() < 1e-3 else "its directions are not orthonormal"


@dataclass(frozen=True, slots=True, eq=False)
class ValueBases:
    """Bases by layer, and the digest of them all."""

    layers: Mapping[int, ValueBasis]
    digest: str

    @property
    def native(self) -> list[tuple[int, Floats, Floats]]:
        """As `_core.configure_next` takes them."""
        return [(il, basis.directions, basis.scales) for il, basis in self.layers.items()]


def sidecar_of(model: str | os.PathLike[str]) -> Path:
    """The file beside a model that keeps its bases: model.kv.gguf for model.gguf."""
    path = Path(model)
    return path.with_name(path.name.removesuffix(".gguf") + ".kv.gguf")


def write_bases(model: str | os.PathLike[str], layers: Mapping[int, ValueBasis], n_tokens: int) -> Path:
    """Write the file beside a model, whole or not at all; its path.

    Raises:
        OSError: it cannot be written.
    """
    path = sidecar_of(model)
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, ARCHITECTURE)
    writer.add_uint32("version", VERSION)
    writer.add_string("model", fingerprint(model))
    writer.add_string("digest", _digest(layers))
    writer.add_uint32("tokens", n_tokens)
    for il, basis in layers.items():
        writer.add_tensor(f"{il}.directions", basis.directions)
        writer.add_tensor(f"{il}.scales", basis.scales)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)
    return path


def read_bases(model: str | os.PathLike[str]) -> ValueBases:
    """Read the file beside a model.

    Raises:
        FileNotFoundError: there is none; the message says how to make it.
        InvalidModelFileError: it is of another model, or damaged.
    """
    path = sidecar_of(model)
    remedy = f"run `mixedkv calibrate -m {os.fspath(model)}`"
    if not path.exists():
        raise FileNotFoundError(
            f"cold_type_v 'lm3' needs bases of this model's values, and {path} is not there: {remedy}"
        )
    metadata = read_model_file(path).metadata
    if metadata.get("general.architecture") != ARCHITECTURE or metadata.get("version") != VERSION:
        raise InvalidModelFileError(f"{path} has no bases of values that this version can read: {remedy}")
    if metadata.get("model") != fingerprint(model):
        raise InvalidModelFileError(f"{path} is of another model than {os.fspath(model)}: {remedy}")
    try:
        layers = _read_layers(path)
    except (ValueError, LookupError, OverflowError) as error:
        raise InvalidModelFileError(f"{path} is damaged ({error}): {remedy}") from error
    digest = _digest(layers)
    if metadata.get("digest") != digest:
        raise InvalidModelFileError(f"{path} is damaged, its checksum is another: {remedy}")
    for il, basis in layers.items():
        if problem := basis.problem():
            raise InvalidModelFileError(f"{path}: the basis of layer {il} is wrong, {problem}: {remedy}")
    return ValueBases(layers, digest)


def value_errors(model: str | os.PathLike[str]) -> dict[int, float]:
    """What lm3 makes of the values of each layer, see `ValueBasis.error`; nothing where there is no file, or
    none that can be used, which is warned of.
    """
    try:
        return {il: basis.error for il, basis in read_bases(model).layers.items()}
    except FileNotFoundError:
        return {}
    except (OSError, InvalidModelFileError) as error:
        remedy = f"mixedkv calibrate -m {os.fspath(model)}"
        log.warning("a budget has no lm3 until `%s` is run again: %s", remedy, error)
        return {}


def _read_layers(path: Path) -> dict[int, ValueBasis]:
    """Raises ValueError, LookupError or OverflowError: it is not as `write_bases` writes it."""
    tensors: dict[str, Any] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type != gguf.GGMLQuantizationType.F32:
            raise ValueError(f"tensor {tensor.name} is not F32")
        tensors[tensor.name] = np.array(tensor.data, np.float32)
    layers = sorted(int(name.partition(".")[0]) for name in tensors if name.endswith(".scales"))
    return {il: ValueBasis(tensors[f"{il}.directions"], tensors[f"{il}.scales"]) for il in layers}


def _digest(layers: Mapping[int, ValueBasis]) -> str:
    digest = hashlib.sha256()
    for il, basis in sorted(layers.items()):
        digest.update(f"{il} {basis.directions.shape}\n".encode())
        digest.update(np.ascontiguousarray(basis.directions, "<f4").tobytes())
        digest.update(np.ascontiguousarray(basis.scales, "<f4").tobytes())
    return digest.hexdigest()
