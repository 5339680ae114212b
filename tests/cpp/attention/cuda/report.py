"""What nvcc makes of the kernels: registers, bytes spilled (which are bounded), blocks of a processor.

    report.py [--variants] [ARCHITECTURE ...]    else for each

With `--variants` it is about all shapes of the prefill kernel (prefill_variants.h), which are not bounded.
Exits with 77, which ctest takes for skipped, where there is no nvcc.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# KiB of a multiprocessor's shared memory; a block takes one besides its own
SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 120: 100}
MOST_SPILLED = 128  # bytes of a thread: some of a prefill's few loop variables
FOLDER = Path(__file__).parent


def run_nvcc(nvcc: str, arguments: list[str]) -> str:
    command = [nvcc, "-std=c++17", "-I", str(FOLDER.parents[3] / "cpp"), "-I", str(FOLDER)]
    done = subprocess.run(
        [*command, *arguments, str(FOLDER / "report.cu")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr}")
    return done.stderr


def shapes_of_prefill(nvcc: str, folder: Path) -> dict[str, tuple[int, int]]:
    """Return threads and bytes of shared memory by what the name of a kernel contains."""
    run_nvcc(nvcc, ["-x", "c++", "-o", str(folder / "shapes")])
    text = subprocess.run([folder / "shapes"], capture_output=True, text=True, check=True).stdout
    lines = (line.split() for line in text.splitlines())
    return {name: (int(threads), int(shared)) for name, threads, shared in lines}


def blocks_of_processor(architecture: int, registers: int, threads: int, shared: int) -> int:
    by_registers = 65536 // (-(-registers // 8) * 8 * threads)
    return min(by_registers, SHARED[architecture] * 1024 // (shared + 1024))


def main() -> None:
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not nvcc:
        print("no nvcc: skipped")
        sys.exit(77)
    variants = "--variants" in sys.argv
    failures = 0
    print("| architecture | kernel | registers | spilled, bytes | shared, bytes | blocks |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        shapes = shapes_of_prefill(nvcc, Path(folder))
        options = ["-Xptxas", "-v", "-cubin", "-use_fast_math", "-o", str(Path(folder) / "report.cubin")]
        options += ["-DREPORT_VARIANTS"] if variants else []
        for architecture in [int(name) for name in sys.argv[1:] if name != "--variants"] or SHARED:
            text = run_nvcc(nvcc, [*options, f"-arch=sm_{architecture}"])
            kernels = re.findall(
                r"entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", text, re.DOTALL
            )
            assert kernels, text
            for name, spilled, registers in kernels:
                short = re.sub(r"^_ZN7mixedkv4cuda\d+", "", name)[:70]
                threads, shared = next((size for key, size in shapes.items() if key in name), (0, 0))
                memory = "- | -"
                if threads:
                    memory = (
                        f"{shared} | {blocks_of_processor(architecture, int(registers), threads, shared)}"
                    )
                print(f"| sm_{architecture} | {short} | {registers} | {spilled} | {memory} |", flush=True)
                failures += not variants and int(spilled) > MOST_SPILLED
    if failures:
        raise SystemExit(f"{failures} kernels spill more than {MOST_SPILLED} bytes")


if __name__ == "__main__":
    main()
