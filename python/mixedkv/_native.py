"""Imports llama_cpp, the Python layer of llama-cpp-python, which lies in this package beside our libraries.

The layer is unchanged and loads the libraries in its own folder. A llama-cpp-python that is installed
besides has libraries of its own, and a pointer from one copy of llama.cpp ends the process in the other. So
everything that could bring a second copy in is refused here, before anything is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_PATH_VARIABLE = "LLAMA_CPP_LIB_PATH"


def load() -> None:
    """Import llama_cpp from this package, so that each later `import llama_cpp` gets this one.

    Raises:
        ImportError: the package was built for another processor, or no CPU backend of it runs on this one;
            another llama_cpp is imported already; a llama.cpp library from elsewhere is loaded or asked for
            by LLAMA_CPP_LIB_PATH.
    """
    folder = library_folder()
    _check_processor(package_folder())
    _check_environment(folder)
    _check_nothing_else_loaded(folder)
    if "llama_cpp" not in sys.modules:
        _import_layer(folder.parent.parent)
    _load_processor_plugin(folder)


def library_folder() -> Path:
    """Return the folder of libllama, libmtmd and the ggml libraries."""
    return package_folder() / "_llama_cpp_python" / "llama_cpp" / "lib"


def package_folder() -> Path:
    """Return the folder of all that was compiled, which in an editable install is not that of the modules."""
    spec = importlib.util.find_spec("mixedkv._core")
    if spec is None or spec.origin is None:
        raise ImportError(
            "mixedkv has no compiled part here: this is its source folder. Install it with `pip install .` "
            "and start Python in another folder."
        )
    return Path(spec.origin).parent


def include_dir() -> Path:
    """Return the folder of `mixedkv/mixedkv.h`, `llama.h` and the ggml headers it needs."""
    return package_folder() / "include"


def cmake_dir() -> Path:
    """Return the folder of the CMake package, for `-Dmixedkv_DIR=`."""
    return package_folder() / "share" / "cmake" / "mixedkv"


def _import_layer(folder: Path) -> None:
    """Import llama_cpp from this folder, whichever comes first on sys.path."""
    spec = PathFinder.find_spec("llama_cpp", [str(folder)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} has no llama_cpp: install mixedkv again")
    module = importlib.util.module_from_spec(spec)
    sys.modules["llama_cpp"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["llama_cpp"]
        raise


def _load_processor_plugin(folder: Path) -> None:
    """Load the one of ggml's CPU backends that suits this processor best, in a build that has several."""
    if next(folder.glob("*ggml-cpu-*"), None) is None:
        return
    ggml = ctypes.CDLL(str(next(file for file in folder.iterdir() if file.stem in ("libggml", "ggml"))))
    if not ggml.ggml_backend_reg_count():
        logger = logging.getLogger("llama-cpp-python")
        level = logger.level
        logger.setLevel(logging.ERROR)  # ggml says what it loads
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
        logger.setLevel(level)
    if not ggml.ggml_backend_reg_count():
        raise ImportError(f"none of the CPU backends in {folder} runs on this processor: install from source")


def _check_processor(folder: Path) -> None:
    """Refuse a library built for another processor, which would end the process with SIGILL."""
    needed = (folder / "processor_features.txt").read_text(encoding="ascii").split()
    try:
        with _CPU_INFO.open("rb") as file:
            text = file.read(16384)  # the first processor's
    except OSError:  # not Linux
        return
    flags = re.search(rb"^flags\s*:(.*)", text, re.M)
    if flags is None:
        return
    if missing := set(needed) - set(flags[1].decode("ascii", "replace").split()):
        raise ImportError(
            f"mixedkv in {folder} was built for a processor with {', '.join(sorted(missing))}, which this "
            "one lacks. Build it here (pip install --no-cache-dir --force-reinstall), or for all processors: "
            "CMAKE_ARGS=-DMIXEDKV_PORTABLE=ON pip install ."
        )


def _check_environment(folder: Path) -> None:
    value = os.environ.get(_PATH_VARIABLE)
    if value is not None and not _same_folder(Path(value), folder):
        raise ImportError(
            f"{_PATH_VARIABLE}={value} names another llama.cpp than {folder}, which mixedkv needs. Unset it."
        )


def _check_nothing_else_loaded(folder: Path) -> None:
    module = sys.modules.get("llama_cpp")
    if module is not None and not _same_folder(Path(module.__file__ or "").parent, folder.parent):
        raise ImportError(
            f"llama_cpp is imported already, from {module.__file__}: another llama-cpp-python, with a "
            "llama.cpp of its own. mixedkv brings its own llama_cpp. Import mixedkv first, or remove the "
            "other, after which the order does not matter: pip uninstall llama-cpp-python"
        )
    for path in mapped_libraries():
        if not _same_folder(path.parent, folder):
            raise ImportError(
                f"another copy of llama.cpp is loaded already: {path}. Import mixedkv first, or use that "
                "library in a process of its own."
            )


def processor_plugin() -> str:
    """Return which of ggml's CPU backends is loaded, such as "zen4", and "" in a build that has one only."""
    names = (re.fullmatch(r"libggml-cpu-(\w+)\.\w+", path.name) for path in mapped_libraries())
    return next((name[1] for name in names if name), "")


def mapped_libraries() -> list[Path]:
    """Return the paths of llama.cpp's and ggml's libraries in this process; none where there is no /proc."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    name = re.compile(r"/.*/lib(llama|mtmd|ggml|ggml-[\w-]+)\.so[\d.]*$", re.M)
    return [Path(path) for path in sorted({match[0] for match in name.finditer(maps.read_text())})]


def _same_folder(path: Path, folder: Path) -> bool:
    return path.resolve() == folder.resolve()
