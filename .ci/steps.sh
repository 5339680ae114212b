# What .ci/run and .ci/nightly have in common, to be sourced by them. Each step has an environment and a temporary folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
system_path=$PATH
export PIP_COMPILE=no # of a hundred packages: Python compiles what is imported

# step NAME COMMAND ...: says how long it took.
step() {
    local name=$1 began=$SECONDS
    shift
    printf '\n--- %s\n' "$name"
    "$@"
    echo "--- $name took $((SECONDS - began)) s"
}

# Needs root only if one of the system packages of the README is missing.
install_system_packages() {
    local missing=()
    command -v g++ > /dev/null || missing+=(g++)
    command -v git > /dev/null || missing+=(git)
    command -v ninja > /dev/null || missing+=(ninja-build)
    python3 -c 'import ensurepip, venv' 2> /dev/null || missing+=(python3-venv)
    python3 -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2> /dev/null || missing+=(python3-dev)
    if [ ${#missing[@]} -gt 0 ]; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
    fi
}

# Tests of sessions in Redis and of the server's page need these, and skip with a reason where they cannot be had.
install_test_packages() {
    local missing=()
    command -v redis-server > /dev/null || missing+=(redis-server)
    command -v chromium > /dev/null || missing+=(chromium)
    if [ ${#missing[@]} -gt 0 ]; then
        { apt-get update -qq &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null; } ||
            echo "not installed, their tests are skipped: ${missing[*]}"
    fi
}

# The fenced block below the line `<!-- command: NAME -->` in README.md.
readme_command() {
    local command
    command=$(awk -v marker="<!-- command: $1 -->" '
        $0 == marker      { found = 1; next }
        found && /^```/   { if (inside) exit; inside = 1; next }
        inside            { print }' README.md)
    if [ -z "$command" ]; then
        echo "README.md has no block marked <!-- command: $1 -->" >&2
        return 1
    fi
    echo "$command"
}

run_readme_command() {
    local command
    command=$(readme_command "$1")
    echo "$command"
    bash -euo pipefail -c "$command"
}

fresh_environment() {
    python3 -m venv "$work/$1"
    export PATH="$work/$1/bin:$system_path"
    python -m pip install --quiet --upgrade 'pip>=25.1'
}

# What needs no llama.cpp, with the address and undefined behaviour sanitizers: sanitize_cpp [FOLDER of tests/cpp ...]
# Without a folder all of it, of which the kernels take most. Accuracy is not a memory matter.
sanitize_cpp() {
    local folder targets=(all)
    python -m pip install --quiet 'cmake>=3.21' ninja
    cmake -S tests/cpp -B "$work/sanitize" -G Ninja -DMIXEDKV_SANITIZE=ON > /dev/null
    if [ $# -gt 0 ]; then
        targets=("${@/%//all}")
    fi
    cmake --build "$work/sanitize" --target "${targets[@]}" > "$work/sanitize.log" || { tail -50 "$work/sanitize.log"; return 1; }
    for folder in "${@:-.}"; do
        ctest --test-dir "$work/sanitize/$folder" -LE bench -E accuracy -j2 --output-on-failure
    done
}

tests() {
    ctest --test-dir build/release "$@" -j2 --output-on-failure
}
