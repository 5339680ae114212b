#!/usr/bin/env bash
# What a GPU does with the mixed cache (docs/platforms.md, "CUDA"): the kernels alone with all shapes of prefill, then correctness
# against the CPU, then tokens per second and memory beside llama.cpp's own caches. Needs an installed package that was built with
# CMAKE_ARGS=-DGGML_CUDA=on, the CUDA toolkit, and Python with gguf. Prints the seconds that have gone before each part.
#
#   tests/measure/gpu/gpu.sh [FOLDER for the models, 6 GB]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tools=$here/../../python/support/models
models=${1:-$(mktemp -d)}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

part() { echo "== $SECONDS s: $1"; }
log() { "$@" >> "$build/log" 2>&1 || { tail -30 "$build/log"; exit 1; }; }

part "programs and models (estimate: 90 s on 16 cores, 8 minutes in all)"
log cmake -S "$here" -B "$build/kernels" -DMIXEDKV_KERNELS_ALONE=ON
cmake --build "$build/kernels" -j > "$build/kernels.log" 2>&1 & # while models are made
kernels=$!
log cmake -S "$here" -B "$build" -DCMAKE_BUILD_TYPE=Release -Dmixedkv_DIR="$(python -c 'import mixedkv; print(mixedkv.cmake_dir())')"
log cmake --build "$build"

[ -f "$models/8b.gguf" ] || python "$tools/random_model.py" "$models/8b.gguf" --kind q4_0 --n-layer 32 --n-embd 4096 --n-head 32 \
    --n-head-kv 8 --n-ff 14336
[ -f "$models/16.gguf" ] || python "$tools/random_model.py" "$models/16.gguf" --kind q4_0 --n-layer 16 --n-embd 2048 --n-head 16 \
    --n-head-kv 8 --n-ff 6144
PYTHONPATH=$here/../../python python - "$models" << 'END'
import sys
from pathlib import Path

from support.models import zoo

for name in ("llama-128", "gemma3", "gpt-oss", "gemma2"):
    if not (Path(sys.argv[1]) / f"{name}.gguf").exists():
        zoo.write(name, Path(sys.argv[1]))
END

wait "$kernels" || { tail -30 "$build/kernels.log"; exit 1; }
part "kernels alone (40 s)"
"$build/kernels/kernel_times"

part "logits against the CPU (60 s)"
for name in llama-128 gemma3 gpt-oss gemma2; do
    THREADS=8 MIXEDKV_ROUNDING=16 "$build/device_speed" check "$models/$name.gguf" --tokens 900 \
        --kv mixed:cold=q8_0 --kv mixed --kv mixed:cold_k=q5_0 --kv mixed:cold=lm4 --kv mixed:cold=tc3
done
part "8 billion parameters (45 s)"
"$build/device_speed" speed "$models/8b.gguf" --kv f16 --kv q8_0 --kv q4_0 --kv mixed --n-gen 32
part "16 layers, all cold types (60 s)"
"$build/device_speed" speed "$models/16.gguf" --kv f16 --kv q4_0 --kv mixed --kv mixed:cold=q8_0 --kv mixed:cold=lm4 \
    --kv mixed:cold_k=q5_0,cold_v=tc3 --kv mixed:attention=merged --n-gen 32
part "8 sequences (60 s)"
"$build/device_speed" speed "$models/16.gguf" --kv f16 --kv q4_0 --kv mixed --kv mixed:cold=lm4 --depths 0,4096,16384 --sequences 8 \
    --n-gen 32
part "131,072 tokens (90 s)"
"$build/device_speed" speed "$models/16.gguf" --kv f16 --kv mixed --kv mixed:cold=lm4 --kv mixed:cold_k=q5_0,cold_v=tc3 --depths 131072 \
    --rounds 2 --n-gen 16
