"""Loads the patched llama.cpp and makes llama_cpp run on it.

llama_cpp opens the libllama in the folder that LLAMA_CPP_LIB_PATH names when it is first imported, and two
copies of ggml in one process silently bind to each other. So everything that could bring a second copy in is
refused here, before anything is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

_PATH_VARIABLE = "LLAMA_CPP_LIB_PATH"
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_PREFIX = "" if sys.platform == "win32" else "lib"


def load() -> None:
    """Load the libraries of this package and import llama_cpp on top of them.

    Raises:
        ImportError: llama_cpp has another version than this package is built for, or a llama.cpp library from
            elsewhere is loaded already or asked for by LLAMA_CPP_LIB_PATH.
    """
    folder = library_folder()
    _check_version(_installed_version())
    _check_environment(folder)
    _check_nothing_else_loaded(folder)
    for path in _libraries(folder):
        ctypes.CDLL(str(path))
    with _library_path(folder):
        import llama_cpp.llama_cpp

    _check_version(llama_cpp.__version__)
    loaded = Path(llama_cpp.llama_cpp._lib._name).parent
    if not loaded.samefile(folder):
        raise ImportError(f"llama_cpp runs on the library in {loaded}, not on the one in {folder}")
    _share_ggml(folder)


def library_folder() -> Path:
    """The folder with libllama and the ggml libraries. It lies beside _core, in an editable install too."""
    spec = importlib.util.find_spec("mixedkv._core")
    if spec is None or spec.origin is None:
        raise ImportError(
            "mixedkv has no compiled part here: this is its source folder. Install it with `pip install .` "
            "and start Python in another folder."
        )
    return Path(spec.origin).parent / "lib"


def required_version() -> str:
    """The one llama-cpp-python version this package works with, as its metadata says."""
    for requirement in importlib.metadata.requires("mixedkv") or []:
        if match := re.match(r"llama[-_]cpp[-_]python *\(?== *([\w.]+)", requirement):
            return match[1]
    raise ImportError("the metadata of mixedkv name no llama-cpp-python version: install mixedkv again")


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_version(version: str | None) -> None:
    required = required_version()
    if version != required:
        found = f"version {version} is installed" if version else "it is not installed"
        raise ImportError(
            f"mixedkv needs llama-cpp-python {required}, but {found}. "
            f"Run: pip install llama-cpp-python=={required}"
        )


def _check_environment(folder: Path) -> None:
    value = os.environ.get(_PATH_VARIABLE)
    if value is not None and not _same_folder(Path(value), folder):
        raise ImportError(
            f"{_PATH_VARIABLE}={value} names another llama.cpp than {folder}, which mixedkv needs. Unset it."
        )


def _check_nothing_else_loaded(folder: Path) -> None:
    remedy = "Import mixedkv first, or use that library in a process of its own."
    module = sys.modules.get("llama_cpp.llama_cpp")
    if module is not None and not _same_folder(Path(module._lib._name).parent, folder):
        raise ImportError(f"llama_cpp is imported already and runs on {module._lib._name}. {remedy}")
    for path in mapped_libraries():
        if not _same_folder(path.parent, folder):
            raise ImportError(f"another copy of llama.cpp is loaded already: {path}. {remedy}")


def mapped_libraries() -> list[Path]:
    """The llama.cpp and ggml libraries in this process, each path once. Empty where there is no /proc."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    name = re.compile(r"/.*/lib(llama|ggml|ggml-[\w-]+)\.so[\d.]*$", re.M)
    return [Path(path) for path in sorted({match[0] for match in name.finditer(maps.read_text())})]


def _libraries(folder: Path) -> list[Path]:
    """In the order in which they need each other: a NEEDED entry then finds its SONAME among those loaded."""
    files = {path.name: path for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}"))}
    try:
        base, ggml, llama = (files.pop(f"{_PREFIX}{key}{_SUFFIX}") for key in ("ggml-base", "ggml", "llama"))
    except KeyError as error:
        raise ImportError(f"{folder} has no {error}: install mixedkv again") from None
    return [base, *files.values(), ggml, llama]


@contextmanager
def _library_path(folder: Path) -> Iterator[None]:
    """Set the variable for one import: a child process that wants the stock llama_cpp must not inherit it."""
    before = os.environ.get(_PATH_VARIABLE)
    os.environ[_PATH_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PATH_VARIABLE]
        else:
            os.environ[_PATH_VARIABLE] = before


def _share_ggml(folder: Path) -> None:
    """llama_cpp._ggml ignores the variable and would load a second libggml: stand in for it."""
    module = ModuleType("llama_cpp._ggml", "libggml of mixedkv")
    module.libggml = ctypes.CDLL(str(folder / f"{_PREFIX}ggml{_SUFFIX}"))  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    sys.modules["llama_cpp"]._ggml = module  # type: ignore[attr-defined]


def _same_folder(path: Path, folder: Path) -> bool:
    return path.resolve() == folder.resolve()
