"""The installed package: what the wheel holds, and that one llama.cpp is loaded, ours, or none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

from mixedkv import _native
from support import REPOSITORY

VARIABLE = "LLAMA_CPP_LIB_PATH"

LIST_LIBRARIES = """
import json, pathlib
lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
print(json.dumps([p for p in paths if pathlib.Path(p).name.startswith(("libllama.", "libggml"))]))
"""


def stock_folder() -> Path:
    spec = importlib.util.find_spec("llama_cpp")
    assert spec
    assert spec.origin
    folder = Path(spec.origin).parent / "lib"
    if not (folder / "libllama.so").exists():
        pytest.skip("llama-cpp-python was installed without its own libraries (LLAMA_BUILD=OFF)")
    return folder


def python(code: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, outside of the repository."""
    env = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-B", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**env, **variables},
    )


def output(code: str, cwd: Path, **variables: str) -> str:
    result = python(code, cwd, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def refusal(code: str, cwd: Path, **variables: str) -> str:
    """The message of the ImportError that code ends with."""
    result = python(code, cwd, **variables)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    return last


def libraries(code: str, cwd: Path, **variables: str) -> list[Path]:
    return [Path(path) for path in json.loads(output(code + LIST_LIBRARIES, cwd, **variables))]


# --- the wheel


def wheel_files() -> list[PurePosixPath]:
    return [PurePosixPath(path) for path in importlib.metadata.files("mixedkv") or []]


def test_everything_lies_in_the_package() -> None:
    tops = {path.parts[0] for path in wheel_files() if path.parts[0] != ".."}
    packages = {"mixedkv", "mixedkv_bench", "mixedkv_llm"}
    assert tops == {*packages, f"mixedkv-{importlib.metadata.version('mixedkv')}.dist-info"}
    outside = [path for path in wheel_files() if path.parts[0] == ".."]
    assert [path.stem for path in outside] == ["mixedkv"]  # the command


def test_each_library_is_there_once_under_the_name_llama_cpp_opens() -> None:
    names = [path.name for path in wheel_files() if path.parent == PurePosixPath("mixedkv/lib")]
    stems = Counter(name.split(".")[0] for name in names)
    assert {"libllama", "libggml", "libggml-base", "libggml-cpu"} <= stems.keys()
    assert set(stems.values()) == {1}
    assert all(name.count(".") == 1 for name in names)


def test_wheel_carries_licences_model_and_type_marker() -> None:
    files = [str(path) for path in wheel_files()]
    folder = Path(_native.__file__).parent
    assert "ggml authors" in (folder / "licenses" / "llama.cpp").read_text()
    assert "Niels Lohmann" in (folder / "licenses" / "nlohmann-json").read_text()
    assert any(path.endswith(".dist-info/licenses/LICENSE") for path in files)
    assert "mixedkv/py.typed" in files
    assert any(PurePosixPath(path).match("mixedkv/bundled/*.gguf") for path in files)


# --- one copy in the process


def test_llama_cpp_runs_on_our_library(tmp_path: Path) -> None:
    code = "import mixedkv, llama_cpp; print(llama_cpp.llama_cpp._lib._name)"
    assert Path(output(code, tmp_path)) == _native.library_folder() / "libllama.so"


@pytest.mark.parametrize("later", ["llama_cpp", "llama_cpp._ggml", "llama_cpp.mtmd_cpp"])
def test_one_copy_of_each_library(later: str, tmp_path: Path) -> None:
    if later == "llama_cpp.mtmd_cpp":
        stock_folder()
    paths = libraries(f"import mixedkv, {later}\n", tmp_path)
    assert {path.parent for path in paths} == {_native.library_folder()}
    assert Counter(path.name for path in paths) == Counter(p.name for p in _native.library_folder().iterdir())


def test_mtmd_resolves_against_our_library(tmp_path: Path) -> None:
    stock_folder()
    code = "import mixedkv, llama_cpp.mtmd_cpp as m; print(m.mtmd_default_marker().decode())"
    assert output(code, tmp_path) != ""


def test_libggml_of_llama_cpp_is_ours(tmp_path: Path) -> None:
    code = "import mixedkv; from llama_cpp import _ggml; print(_ggml.libggml._name)"
    assert Path(output(code, tmp_path)).parent == _native.library_folder()


# --- refusals


def test_llama_cpp_imported_first_is_refused(tmp_path: Path) -> None:
    stock = stock_folder()
    message = refusal("import llama_cpp, mixedkv", tmp_path)
    assert str(stock) in message
    assert "Import mixedkv first" in message


def test_refused_import_loads_nothing(tmp_path: Path) -> None:
    stock = stock_folder()
    code = "import llama_cpp\ntry: import mixedkv\nexcept ImportError: pass\n"
    assert {path.parent for path in libraries(code, tmp_path)} == {stock}


def test_other_copy_of_ggml_is_refused(tmp_path: Path) -> None:
    library = stock_folder() / "libggml-base.so"
    message = refusal(f"import ctypes; ctypes.CDLL({str(library)!r}); import mixedkv", tmp_path)
    assert str(library.parent) in message


def test_other_version_is_refused(tmp_path: Path) -> None:
    info = tmp_path / "llama_cpp_python-0.3.35.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.3.35\n")
    message = refusal("import mixedkv", tmp_path, PYTHONPATH=str(tmp_path))
    assert "0.3.35 is installed" in message
    assert f"pip install llama-cpp-python=={_native.required_version()}" in message


def test_missing_llama_cpp_is_refused() -> None:
    with pytest.raises(ImportError, match=r"not installed.*pip install llama-cpp-python=="):
        _native._check_version(None)


def test_llama_cpp_that_contradicts_its_metadata_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.3.1"\n')
    (package / "llama_cpp.py").write_text("")
    assert "0.3.1" in refusal("import mixedkv", tmp_path, PYTHONPATH=str(tmp_path))


def test_source_folder_is_refused() -> None:
    assert "pip install ." in refusal("import mixedkv", REPOSITORY / "python")


# --- the environment variable


def test_variable_that_names_another_folder_is_refused(tmp_path: Path) -> None:
    message = refusal("import mixedkv", tmp_path, **{VARIABLE: str(tmp_path)})
    assert f"{VARIABLE}={tmp_path}" in message
    assert "Unset" in message


def test_variable_that_names_our_folder_is_kept(tmp_path: Path) -> None:
    ours = str(_native.library_folder())
    code = f"import os, mixedkv; print(os.environ[{VARIABLE!r}])"
    assert output(code, tmp_path, **{VARIABLE: ours}) == ours


def test_child_process_gets_the_stock_library(tmp_path: Path) -> None:
    stock = stock_folder()
    child = "import llama_cpp; print(llama_cpp.llama_cpp._lib._name)"
    code = f"import subprocess, sys, mixedkv; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    assert Path(output(code, tmp_path)).parent == stock
