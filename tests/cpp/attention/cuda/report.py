"""What nvcc makes of the kernels: registers and bytes spilled, which are bounded.

    report.py [ARCHITECTURE ...]    else for each

Exits with 77, which ctest takes for skipped, where there is no nvcc.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHITECTURES = (80, 86, 89, 90, 120)
MOST_SPILLED = 128  # bytes of a thread: some of a prefill's few loop variables
FOLDER = Path(__file__).parent


def compile_for(nvcc: str, architecture: int, out: Path) -> str:
    command = [nvcc, "-std=c++17", f"-arch=sm_{architecture}", "-use_fast_math", "-Xptxas", "-v", "-cubin"]
    command += ["-I", str(FOLDER.parents[3] / "cpp"), "-o", str(out), str(FOLDER / "report.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"sm_{architecture}: {done.stderr}")
    return done.stderr


def main() -> None:
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not nvcc:
        print("no nvcc: skipped")
        sys.exit(77)
    failures = 0
    print("| architecture | kernel | registers | spilled, bytes |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for architecture in [int(name) for name in sys.argv[1:]] or ARCHITECTURES:
            text = compile_for(nvcc, architecture, Path(folder) / "report.cubin")
            kernels = re.findall(
                r"entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", text, re.DOTALL
            )
            assert kernels, text
            for name, spilled, registers in kernels:
                short = re.sub(r"^_ZN7mixedkv4cuda\d+", "", name)[:60]
                print(f"| sm_{architecture} | {short} | {registers} | {spilled} |")
                failures += int(spilled) > MOST_SPILLED
    if failures:
        raise SystemExit(f"{failures} kernels spill more than {MOST_SPILLED} bytes")


if __name__ == "__main__":
    main()
