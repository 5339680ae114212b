"""Count what attention and products with weights execute on ARM, here and in llama.cpp, on any machine.

    apt-get install g++-aarch64-linux-gnu qemu-user cmake ninja-build llvm-19
    python tests/measure/arm/counts.py --llama-cpp llama_cpp_python-0.3.36/vendor/llama.cpp
    python tests/measure/arm/counts.py --llama-cpp llama_cpp_python-0.3.36/vendor/llama.cpp --of products

qemu-user runs one layer's attention, or one product, on one thread, and a plugin counts how often each
block of instructions is executed. What one call takes is the difference between two calls and one. With
`llvm-mca` the blocks that make 99.5% of the instructions also get cycles: those of a block that is repeated,
as the model of a processor has them.

A query of llama.cpp in q4_0 costs the same whatever its neighbours, so it is counted with two and scaled.
So does a column of a product, counted with 32. For products llama.cpp is compiled for each processor, and
repacks rows for it as it does when it loads a model.
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
GGML_COLUMNS = 32  # that llama.cpp's products of many columns are counted with
ELEMENTS, ROWS = 2048, 1024  # of a product: product_once.cpp
# What llama.cpp is compiled for, by the model of qemu-user that runs it; without SVE
ARCHITECTURES = {
    "cortex-a72": "armv8-a",
    "cortex-a76": "armv8.2-a+dotprod+fp16",
    "neoverse-n1": "armv8.2-a+dotprod+fp16",
    "max": "armv8.2-a+dotprod+fp16+i8mm",
}
COVERED = 0.995  # of the instructions, for which cycles are asked
MCA_CPUS = ("neoverse-n1", "neoverse-v1")  # Cortex-A76 has the pipelines of N1, and no model of its own
ITERATIONS = 20  # of a block
CYCLES = re.compile(r"^Total Cycles:\s+(\d+)$", re.M)

Blocks = dict[tuple[int, str], int]


@dataclass(frozen=True)
class Case:
    """One call: whose, on which processor of qemu-user, and of what."""

    label: str
    program: str
    whose: str
    cpu: str
    architecture: str  # of llama.cpp
    arguments: tuple[str, ...]
    parts: float  # that its instructions are divided by
    scale: float = 1.0


@dataclass(frozen=True)
class Count:
    """What a call takes."""

    kernels: str
    instructions: float
    cycles: dict[str, float | None]


def log(command: list[str]) -> None:
    """Run a command of the build, whose output is shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def build_plugin(folder: Path) -> Path:
    plugin = folder / "executed_blocks.so"
    folder.mkdir(parents=True, exist_ok=True)
    compile_plugin = ["cc", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
    log([*compile_plugin, str(HERE / "executed_blocks.c"), "-o", str(plugin)])
    return plugin


def build_program(folder: Path, llama_cpp: Path, architecture: str, program: str) -> Path:
    folder = folder / architecture
    toolchain = ROOT / ".ci" / "aarch64" / "toolchain.cmake"
    configure = ["cmake", "-S", str(HERE), "-B", str(folder), "-G", "Ninja"]
    log(
        [
            *configure,
            f"-DCMAKE_TOOLCHAIN_FILE={toolchain}",
            f"-DMIXEDKV_LLAMA_CPP={llama_cpp.resolve()}",
            f"-DGGML_CPU_ARM_ARCH={architecture}",
        ]
    )
    log(["cmake", "--build", str(folder), "-j2", "--target", program])
    return folder / program


def execute(program: Path, plugin: Path, case: Case, calls: int) -> tuple[Blocks, str]:
    """Return how often each block was executed in a process of some calls, and whose kernels it took."""
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "blocks"
        command = ["qemu-aarch64", "-cpu", case.cpu, "-plugin", f"{plugin},out={out}", str(program)]
        command += [case.whose, *case.arguments, str(calls)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        blocks: Blocks = {}
        for line in out.read_text().splitlines():
            address, times, code = line.split(" ", 2)
            key = int(address, 16), code.strip()
            blocks[key] = blocks.get(key, 0) + int(times)
    return blocks, done.stdout.split()[0]


def instructions_of(code: str) -> int:
    return code.count(" ") + 1


def cycles_of(blocks: Blocks, mca: str, cpu: str) -> float | None:
    """Return the cycles of all blocks by the model of a processor, each as often as it was executed.

    None if the processor lacks an instruction.
    """
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
    done = subprocess.run(command, input="\n".join(text), capture_output=True, text=True, check=False)
    if "unsupported instruction" in done.stderr:
        return None
    report = done.stdout
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
    cycles = {cpu: cycles_of(call, mca, cpu) for cpu in (MCA_CPUS if mca else ())}
    scaled = {cpu: case.scale * n if n else None for cpu, n in cycles.items()}
    return Count(kernels, case.scale * instructions, scaled)


def attention_cases(keys: int, queries: int, types: list[str], cpus: list[str]) -> list[list[Case]]:
    """Groups of cases whose first one the others are compared with."""

    def case(label: str, whose: str, cpu: str, kind: str, n: int, scale: float = 1.0) -> Case:
        arguments, parts = (kind, str(keys), str(n)), keys * n * scale * HEADS
        return Case(
            label, "attention_once", whose, cpu, ARCHITECTURES["neoverse-n1"], arguments, parts, scale
        )

    out = []
    for n in sorted({1, queries}):
        what = "decode" if n == 1 else f"{n} queries"
        n_ggml = min(n, GGML_QUERIES)
        label = f"{what}, {keys} keys, llama.cpp q4_0"
        group = [case(label, "ggml", "max", "q4_0", n_ggml, n / n_ggml)]
        for kind in types:
            for cpu in cpus:
                group.append(case(f"{what}, {keys} keys, {kind}", "ours", cpu, kind, n))
        out.append(group)
    return out


def product_cases(columns: int, types: list[str], cpus: list[str]) -> list[list[Case]]:
    """Groups of two: a product on a processor by llama.cpp, and by this package."""
    out = []
    for n in sorted({1, columns}):
        n_ggml = min(n, GGML_COLUMNS)
        for kind in types:
            for cpu in cpus:
                group = []
                for whose, counted in (("ggml", n_ggml), ("ours", n)):
                    scale = n / counted
                    label = f"{n} column{'s' if n > 1 else ''}, {kind}, {cpu}"
                    arguments, parts = (kind, str(counted)), ELEMENTS * ROWS * n / 1000
                    architecture = ARCHITECTURES[cpu]
                    group.append(
                        Case(label, "product_once", whose, cpu, architecture, arguments, parts, scale)
                    )
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
    parser.add_argument("--of", choices=["attention", "products"], default="attention")
    parser.add_argument("--columns", type=int, default=512, help="of a product")
    parser.add_argument("--types", default="", help="of rows")
    parser.add_argument("--cpus", default="cortex-a72,neoverse-n1,max", help=f"of {', '.join(ARCHITECTURES)}")
    options = parser.parse_args()
    cpus = options.cpus.split(",")
    if unknown := sorted(set(cpus) - set(ARCHITECTURES)):
        parser.error(f"--cpus {','.join(unknown)}: not one of {', '.join(ARCHITECTURES)}")
    if options.of == "attention":
        types, part = options.types or "q4_0,q8_0,q5_0", "by key and head"
        groups = attention_cases(options.keys, options.queries, types.split(","), cpus)
    else:
        types, part = options.types or "q4_0,q4_1,q8_0,q4_K,q5_K,q6_K", "by 1,000 products"
        groups = product_cases(options.columns, types.split(","), cpus)
    mca = next((name for name in ("llvm-mca-19", "llvm-mca") if shutil.which(name)), None)
    plugin = build_plugin(options.build)
    built = {(case.architecture, case.program) for group in groups for case in group}
    programs = {one: build_program(options.build, options.llama_cpp, *one) for one in sorted(built)}
    names = [f"cycles, {cpu}" for cpu in (MCA_CPUS if mca else ())]
    head = ["one call", "kernels", "instructions", part, "of llama.cpp's", *names]
    print("| " + " | ".join(head) + " |")
    print("|---|---|---|---|---|" + "---|" * len(names))
    for group in groups:
        base = 0.0
        for case in group:
            found = count(programs[case.architecture, case.program], plugin, case, mca)
            base = base or found.instructions
            cycles = [f"{n:.3g}" if n else "" for n in found.cycles.values()]
            cells = [
                case.label,
                found.kernels,
                f"{found.instructions:.3g}",
                f"{found.instructions / case.parts:.4g}",
            ]
            print("| " + " | ".join([*cells, f"{found.instructions / base:.3f}", *cycles]) + " |", flush=True)


if __name__ == "__main__":
    main()
