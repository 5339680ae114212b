"""The package with a sanitizer, from a build that is there: build.py address|thread BUILD DESTINATION

What is ours, and what of llama.cpp is patched or near it, is compiled once more, by the commands of BUILD's
compile_commands.json with other flags. All else are BUILD's objects.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {
    # A finding ends the process: what recovers is left to whoever reads the log. Not looked for: numbers
    # that no enum has, since llama.cpp's API takes types as an enum, and any number can come.
    "address": ["-fsanitize=address,undefined", "-fno-sanitize=enum", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
# asserts of llama.cpp too; the headers of pybind11 went with pip's build environment
COMPILE = ["-O1", "-g1", "-UNDEBUG", "-fno-omit-frame-pointer", f"-I{pybind11.get_include()}"]
# of the bindings several are compiled as one file, which lies in the build folder
OURS = ("/cpp/llama/", "/cpp/capi/", "/cpp/hot_set/", "/cpp/spec/", "/cpp/bindings/", "/_core.dir/")
# of the kernels, which have sanitizers of their own in tests/cpp, one body: MIXEDKV_ISA=scalar
KERNELS = ("/attention/dispatch.cpp", "/attention/attention_scalar.cpp")
UPSTREAM = tuple(
    f"/llama.cpp/src/llama-{name}.cpp"
    for name in ("kv-cache", "kv-cache-iswa", "memory-hybrid", "context", "graph", "batch")
)
THREADS = ("/ggml-cpu/ggml-cpu.c",)  # its barriers, or no two threads of a graph seem to wait for each other


LIBRARIES = "_llama_cpp_python/llama_cpp/lib"


def main(kind: str, build: Path, destination: Path) -> None:
    objects, libraries = destination / "objects", destination / "mixedkv" / LIBRARIES
    objects.mkdir(parents=True, exist_ok=True)
    libraries.mkdir(parents=True, exist_ok=True)

    def compile_or_reuse(entry: dict[str, str]) -> Path:
        """The object of a source: instrumented, or the one that is there."""
        command = shlex.split(entry["command"])
        at = command.index("-o")
        file = entry["file"]
        expected = any(part in file for part in OURS) or file.endswith(KERNELS + UPSTREAM + THREADS)
        if not expected:
            return build / command[at + 1]
        path = objects / f"{Path(file).name}.o"
        if path.exists() and path.stat().st_mtime > newest:
            return path
        compiler = [part for part in command[:at] if part != "-flto=auto"]
        subprocess.run(
            [*compiler, *COMPILE, *FLAGS[kind], "-o", path, *command[at + 2 :]],
            cwd=entry["directory"],
            check=True,
        )
        return path

    def objects_of(*targets: str) -> list[Path]:
        folders = tuple(f"/{target}.dir/" for target in targets)
        entries = [e for e in commands if any(folder in f"/{e['command']}" for folder in folders)]
        return list(pool.map(compile_or_reuse, entries))

    def link(path: Path, objects: list[Path], needs: list[str], name: str, rpath: str = "$ORIGIN") -> None:
        options = [f"-Wl,-soname,{name}", f"-Wl,-rpath,{rpath}", *FLAGS[kind]]
        needed = [libraries / f"lib{need}.so" for need in needs]
        subprocess.run(["g++", "-shared", "-o", path, *objects, *needed, *options], check=True)

    newest = max(path.stat().st_mtime for path in [build / "bin" / "libllama.so", *ROOT.glob("cpp/**/*.*")])
    commands = json.loads((build / "compile_commands.json").read_text())
    for name in ("ggml-base", "ggml"):
        shutil.copy(build / "bin" / f"lib{name}.so", libraries)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        link(libraries / "libggml-cpu.so", objects_of("ggml-cpu"), ["ggml-base"], "libggml-cpu.so")
        needs = ["ggml", "ggml-cpu", "ggml-base"]
        link(libraries / "libllama.so", objects_of("llama", "mixedkv_attention"), needs, "libllama.so")
        core = destination / "mixedkv" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
        link(core, objects_of("_core"), ["llama", *needs], core.name, f"$ORIGIN/{LIBRARIES}")
    shutil.copy(build / "processor_features.txt", destination / "mixedkv")
    for file in (build / "llama-cpp-python" / "llama_cpp").iterdir():  # the Python layer
        (libraries.parent / file.name).unlink(missing_ok=True)
        (libraries.parent / file.name).symlink_to(file)
    for module in (ROOT / "python" / "mixedkv").iterdir():
        (destination / "mixedkv" / module.name).unlink(missing_ok=True)
        (destination / "mixedkv" / module.name).symlink_to(module)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]).resolve())
