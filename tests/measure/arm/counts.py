"""Count what attention executes on ARM, by this package's kernels and by llama.cpp's, without such a machine.

    apt-get install g++-aarch64-linux-gnu qemu-user cmake ninja-build llvm-19
    python tests/measure/arm/counts.py --llama-cpp llama_cpp_python-0.3.36/vendor/llama.cpp

qemu-user runs one layer's attention on one thread, and a plugin counts how often each block of
instructions is executed. What one call takes is the difference between two calls and one. With `llvm-mca`
the blocks that make 99.5% of the instructions also get cycles: those of a block that is repeated, as the
model of a processor has them.

A query of llama.cpp in q4_0 costs the same whatever its neighbours, so it is counted with two and scaled.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

HEADS = 16
GGML_QUERIES = 2  # that llama.cpp's prompts are counted with
COVERED = 0.995  # of the instructions, for which cycles are asked
MCA_CPUS = ("neoverse-n1", "neoverse-v1")  # Cortex-A76 has the pipelines of N1, and no model of its own
ITERATIONS = 20  # of a block
CYCLES = re.compile(r"^Total Cycles:\s+(\d+)$", re.M)

Blocks = dict[tuple[int, str], int]


@dataclass(frozen=True)
class Case:
    """One call of attention: whose, on which processor of qemu-user, and over what."""

    label: str
    whose: str
    cpu: str
    type: str
    keys: int
    queries: int
    scale: float = 1.0


@dataclass(frozen=True)
class Count:
    """What a call takes."""

    kernels: str
    instructions: float
    cycles: dict[str, float]


def log(command: list[str]) -> None:
    """Run a command of the build, whose output is shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def build(folder: Path, llama_cpp: Path) -> tuple[Path, Path]:
    """Compile the program for ARM and the plugin for this machine, and return both."""
    plugin = folder / "executed_blocks.so"
    folder.mkdir(parents=True, exist_ok=True)
    compile_plugin = ["cc", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
    log([*compile_plugin, str(HERE / "executed_blocks.c"), "-o", str(plugin)])
    toolchain = ROOT / ".ci" / "aarch64" / "toolchain.cmake"
    configure = ["cmake", "-S", str(HERE), "-B", str(folder), "-G", "Ninja"]
    log([*configure, f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", f"-DMIXEDKV_LLAMA_CPP={llama_cpp.resolve()}"])
    log(["cmake", "--build", str(folder), "-j2"])
    return folder / "attention_once", plugin


def execute(program: Path, plugin: Path, case: Case, calls: int) -> tuple[Blocks, str]:
    """Return how often each block was executed in a process of some calls, and whose kernels it took."""
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "blocks"
        command = ["qemu-aarch64", "-cpu", case.cpu, "-plugin", f"{plugin},out={out}", str(program)]
        command += [case.whose, case.type, str(case.keys), str(case.queries), str(calls)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        blocks: Blocks = {}
        for line in out.read_text().splitlines():
            address, times, code = line.split(" ", 2)
            key = int(address, 16), code.strip()
            blocks[key] = blocks.get(key, 0) + int(times)
    return blocks, done.stdout.split()[0]


def instructions_of(code: str) -> int:
    return code.count(" ") + 1


def cycles_of(blocks: Blocks, mca: str, cpu: str) -> float:
    """Return the cycles of all blocks by the model of a processor, each as often as it was executed."""
    total = sum(times * instructions_of(code) for (_, code), times in blocks.items())
    ordered = sorted(blocks.items(), key=lambda item: -item[1] * instructions_of(item[0][1]))
    chosen, seen = [], 0.0
    for (_, code), times in ordered:
        if seen >= COVERED * total:
            break
        chosen.append((code, times))
        seen += times * instructions_of(code)
    text = []
    for code, _ in chosen:
        hex_bytes = " ".join(f"0x{byte}" for byte in re.findall("..", code.replace(" ", "")))
        lines = subprocess.run(
            [mca.replace("llvm-mca", "llvm-mc"), "--disassemble", "-triple=aarch64", "-mattr=+all"],
            input=hex_bytes,
            capture_output=True,
            text=True,
            check=True,
        )
        text.append("# LLVM-MCA-BEGIN\n" + lines.stdout.replace("\t.text\n", "") + "# LLVM-MCA-END\n")
    command = [mca, "-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+all", "-instruction-info=0"]
    command += ["-resource-pressure=0", f"-iterations={ITERATIONS}"]
    report = subprocess.run(command, input="\n".join(text), capture_output=True, text=True, check=True).stdout
    found = [int(cycles) / ITERATIONS for cycles in CYCLES.findall(report)]
    if len(found) != len(chosen):
        sys.exit(f"{mca} has {len(found)} of {len(chosen)} blocks:\n{report[:2000]}")
    return sum(cycles * times for cycles, (_, times) in zip(found, chosen, strict=True)) * total / seen


def count(program: Path, plugin: Path, case: Case, mca: str | None) -> Count:
    """Count one call."""
    once, _ = execute(program, plugin, case, 1)
    twice, kernels = execute(program, plugin, case, 2)
    call = {key: times - once.get(key, 0) for key, times in twice.items() if times > once.get(key, 0)}
    instructions = sum(times * instructions_of(code) for (_, code), times in call.items())
    cycles = {cpu: case.scale * cycles_of(call, mca, cpu) for cpu in (MCA_CPUS if mca else ())}
    return Count(kernels, case.scale * instructions, cycles)


def cases(keys: int, queries: int, types: list[str], cpus: list[str]) -> list[list[Case]]:
    """Groups of cases whose first one the others are compared with."""
    out = []
    for n in sorted({1, queries}):
        what = "decode" if n == 1 else f"{n} queries"
        n_ggml = min(n, GGML_QUERIES)
        label = f"{what}, {keys} keys, llama.cpp q4_0"
        group = [Case(label, "ggml", "max", "q4_0", keys, n_ggml, n / n_ggml)]
        for kind in types:
            for cpu in cpus:
                group.append(Case(f"{what}, {keys} keys, {kind}", "ours", cpu, kind, keys, n))
        out.append(group)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--llama-cpp", type=Path, required=True, metavar="FOLDER", help="llama.cpp's source, without patches"
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "arm", help="where it is compiled")
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--queries", type=int, default=64, help="of a prompt")
    parser.add_argument("--types", default="q4_0,q8_0,q5_0")
    parser.add_argument("--cpus", default="cortex-a72,neoverse-n1,max", help="models of qemu-user")
    options = parser.parse_args()
    mca = next((name for name in ("llvm-mca-19", "llvm-mca") if shutil.which(name)), None)
    program, plugin = build(options.build, options.llama_cpp)
    names = [f"cycles, {cpu}" for cpu in (MCA_CPUS if mca else ())]
    head = ["one layer", "kernels", "instructions", "by key and head", "of llama.cpp's", *names]
    print("| " + " | ".join(head) + " |")
    print("|---|---|---|---|---|" + "---|" * len(names))
    for group in cases(options.keys, options.queries, options.types.split(","), options.cpus.split(",")):
        base = 0.0
        for case in group:
            found = count(program, plugin, case, mca)
            base = base or found.instructions
            per_key = found.instructions / (case.keys * case.queries * case.scale * HEADS)
            cycles = [f"{found.cycles[cpu]:.3g}" for cpu in found.cycles]
            cells = [case.label, found.kernels, f"{found.instructions:.3g}", f"{per_key:.0f}"]
            print("| " + " | ".join([*cells, f"{found.instructions / base:.3f}", *cycles]) + " |", flush=True)


if __name__ == "__main__":
    main()
