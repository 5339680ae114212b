"""The installed package: what the wheel holds, and which llama_cpp is imported in which order."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from mixedkv import _native
from support import REPOSITORY
from support.cache.stock_library import stock_library

pytestmark = pytest.mark.full

# What `pip install -e` lays out differently; .ci/run tests a wheel.
of_a_wheel = pytest.mark.skipif(
    _native.package_folder() != Path(_native.__file__).parent, reason="an editable install, not a wheel's"
)
VARIABLE = "LLAMA_CPP_LIB_PATH"
LAYER = "mixedkv/_llama_cpp_python"

LIST_LIBRARIES = """
import json, pathlib
lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
print(json.dumps([p for p in paths if pathlib.Path(p).name.startswith(("libllama.", "libmtmd.", "libggml"))]))
"""


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


@of_a_wheel
def test_everything_lies_in_the_package() -> None:
    tops = {path.parts[0] for path in wheel_files() if path.parts[0] != ".."}
    roles = ("bench", "llm", "ray", "server", "service", "split")  # packages beside the core
    packages = {"mixedkv", "mixedkv_llama_cpp.pth", *(f"mixedkv_{role}" for role in roles)}
    assert tops == {*packages, f"mixedkv-{importlib.metadata.version('mixedkv')}.dist-info"}
    outside = [path for path in wheel_files() if path.parts[0] == ".."]
    assert [path.stem for path in outside] == ["mixedkv"]  # the command


def test_each_library_is_there_once_under_the_name_llama_cpp_opens() -> None:
    folder = PurePosixPath(LAYER, "llama_cpp", "lib")
    names = [path.name for path in wheel_files() if path.parent == folder]
    stems = Counter(name.split(".")[0] for name in names)
    assert {"libllama", "libmtmd", "libggml", "libggml-base", "libggml-cpu"} <= stems.keys()
    assert set(stems.values()) == {1}
    assert all(name.count(".") == 1 for name in names)


@of_a_wheel
def test_wheel_carries_licences_model_and_type_marker() -> None:
    files = [str(path) for path in wheel_files()]
    folder = Path(_native.__file__).parent
    assert "ggml authors" in (folder / "licenses" / "llama.cpp").read_text()
    assert "Andrei Betlen" in (folder / "licenses" / "llama-cpp-python").read_text()
    assert "Niels Lohmann" in (folder / "licenses" / "nlohmann-json").read_text()
    assert "Wenzel Jakob" in (folder / "licenses" / "pybind11").read_text()
    assert any(path.endswith(".dist-info/licenses/LICENSE") for path in files)
    assert {"mixedkv/py.typed", f"{LAYER}/llama_cpp/py.typed"} <= {*files}
    assert any(PurePosixPath(path).match("mixedkv/bundled/*.gguf") for path in files)


@of_a_wheel
def test_bill_of_materials_names_each_licence_that_is_there() -> None:
    path = next(path for path in importlib.metadata.files("mixedkv") or [] if path.name == "mixedkv.cdx.json")
    assert path.parent.name == "sboms"
    bill = json.loads(path.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["version"] == importlib.metadata.version("mixedkv")
    names = [component["name"] for component in bill["components"]]
    assert names == list(dict.fromkeys(names))
    folder = Path(_native.__file__).parent / "licenses"
    assert {*names} == {path.name for path in folder.iterdir()}
    assert {"llama.cpp", "llama-cpp-python", "nlohmann-json", "miniaudio", "stb_image", "pybind11"} <= {
        *names
    }
    assert all(component["licenses"][0]["expression"] for component in bill["components"])
    versions = {component["name"]: component.get("version") for component in bill["components"]}
    assert re.fullmatch(r"\d+\.\d+\.\d+", versions["nlohmann-json"])
    assert re.fullmatch(r"3\.\d+\.\d+", versions["pybind11"])


def test_the_python_layer_is_that_of_the_pin(tmp_path: Path) -> None:
    pin = (REPOSITORY / "vendor" / "pin.toml").read_text()
    pinned = re.search(r'^version\s*=\s*"(.+)"$', pin, re.M)
    assert pinned
    assert output("import mixedkv, llama_cpp; print(llama_cpp.__version__)", tmp_path) == pinned[1]


# --- one copy in the process


def test_llama_cpp_runs_on_our_library(tmp_path: Path) -> None:
    code = "import mixedkv, llama_cpp; print(llama_cpp.llama_cpp._lib._name)"
    assert Path(output(code, tmp_path)) == _native.library_folder() / "libllama.so"


@pytest.mark.parametrize("later", ["llama_cpp", "llama_cpp._ggml", "llama_cpp.mtmd_cpp"])
def test_one_copy_of_each_library(later: str, tmp_path: Path) -> None:
    paths = libraries(f"import mixedkv, {later}\n", tmp_path)
    assert {path.parent for path in paths} == {_native.library_folder()}
    expected = Counter(path.name for path in _native.library_folder().iterdir())
    if later != "llama_cpp.mtmd_cpp":
        del expected["libmtmd.so"]
    assert Counter(path.name for path in paths) == expected


def test_mtmd_resolves_against_our_library(tmp_path: Path) -> None:
    code = "import mixedkv, llama_cpp.mtmd_cpp as m; print(m.mtmd_default_marker().decode())"
    assert output(code, tmp_path) != ""


def test_a_search_path_for_libraries_does_not_count(tmp_path: Path) -> None:
    """A libggml of the system, which a user's LD_LIBRARY_PATH finds, is of another llama.cpp."""
    for name in ("libggml.so", "libggml-base.so", "libggml-cpu.so"):
        (tmp_path / name).write_bytes(b"no library")
    assert libraries("import llama_cpp\n", tmp_path, LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=our_layer())


# --- beside an installed llama-cpp-python, or none


def our_layer() -> str:
    return str(_native.library_folder().parent.parent)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages with all that is installed here but llama-cpp-python."""
    folder = tmp_path_factory.mktemp("site")
    for path in map(Path, sys.path):
        if path.name == "site-packages":
            for entry in path.iterdir():
                taken = entry.name.startswith("llama_cpp") or (folder / entry.name).exists()
                if not taken and entry.suffix not in (".pth", ".egg-link"):
                    (folder / entry.name).symlink_to(entry)
    pth = folder / "mixedkv_llama_cpp.pth"
    shutil.copy(_native.package_folder().parent / pth.name, pth)
    return folder


def in_site(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code where this is the only site-packages."""
    start = f"import site; site.addsitedir({str(site)!r})\n"
    command = [sys.executable, "-I", "-S", "-B", "-c", start + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=site)


@pytest.fixture(
    params=["none", "0.2.90", "0.9.0", pytest.param("pinned", marks=pytest.mark.needs("stock llama.cpp"))]
)
def installed(request: pytest.FixtureRequest, site: Path) -> Iterator[str]:
    """Which llama-cpp-python is in the site-packages, before or after mixedkv: a version stands for one whose
    Python files say no more than it."""
    version, module = request.param, site / "llama_cpp"
    if version == "pinned":
        stock = stock_library()
        assert stock is not None
        module.symlink_to(stock.parent)
    elif version != "none":
        module.mkdir()
        (module / "__init__.py").write_text(f"__version__ = {version!r}\nclass LlamaGrammar: pass\n")
    yield version
    if module.is_symlink():
        module.unlink()
    elif module.exists():
        shutil.rmtree(module)


@of_a_wheel
@pytest.mark.parametrize("first", ["import mixedkv", "from mixedkv import Llama"])
def test_after_mixedkv_llama_cpp_is_ours(first: str, installed: str, site: Path) -> None:
    code = f"{first}\nfrom llama_cpp import Llama as Base, LlamaGrammar\nimport llama_cpp, mixedkv\n"
    code += "assert issubclass(mixedkv.Llama, Base)\nprint(llama_cpp.llama_cpp._lib._name)"
    done = in_site(site, code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve().parent == _native.library_folder().resolve()


@of_a_wheel
def test_before_mixedkv_llama_cpp_is_ours_or_refused(installed: str, site: Path) -> None:
    """As isort orders them."""
    code = "from llama_cpp import LlamaGrammar\nfrom mixedkv import Llama\nimport llama_cpp\n"
    done = in_site(site, f"{code}assert issubclass(Llama, llama_cpp.Llama)\n")
    if installed == "none":
        assert done.returncode == 0, done.stderr
        return
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: llama_cpp is imported already, from {site}/llama_cpp/__init__.py")
    assert "Import mixedkv first" in last
    assert "pip uninstall llama-cpp-python" in last


def test_without_mixedkv_an_installed_one_is_itself(installed: str, site: Path) -> None:
    done = in_site(site, "import llama_cpp; print(llama_cpp.__file__)")
    assert done.returncode == 0, done.stderr
    ours = _native.library_folder().parent.resolve()
    assert (Path(done.stdout.strip()).parent.resolve() == ours) == (installed == "none")


def test_refused_import_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").touch()
    code = "import llama_cpp\ntry: import mixedkv\nexcept ImportError: pass\n"
    assert libraries(code, tmp_path, PYTHONPATH=str(tmp_path)) == []


def test_other_copy_of_ggml_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "libggml-base.so.0"
    shutil.copy(_native.library_folder() / "libggml-base.so", library)
    message = refusal(f"import ctypes; ctypes.CDLL({str(library)!r}); import mixedkv", tmp_path)
    assert str(library) in message


def test_pip_has_no_complaint() -> None:
    """llama-cpp-python is in an extra only: any version of it, or none, may be installed."""
    needed = importlib.metadata.requires("mixedkv") or []
    assert [name for name in needed if name.startswith("llama") and "extra ==" not in name] == []


@of_a_wheel
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
