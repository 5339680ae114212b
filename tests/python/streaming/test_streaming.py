"""Layers that are read for each pass: the same bits as from memory, and what is said when they cannot be."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.engine import Engine
from mixedkv.engine.embed.embedding_context import EmbeddingContext, InputSpan
from mixedkv.errors import ModelReadError
from mixedkv.model.gguf_file import read_model_file
from support import TESTS
from support.models.random_model import RandomModel

pytestmark = pytest.mark.full

N_LAYER = 6
PROMPT = list(range(3, 43))
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32, "n_threads": 1, "n_threads_batch": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streaming") / "q4_0.gguf"
    RandomModel(
        n_layer=N_LAYER, n_embd=512, n_head=8, n_head_kv=2, head_size=64, n_ff=1024, kind="q4_0"
    ).write(path)
    return path


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(model, tmp_path / "copy.gguf"))


def _open(path: Path, **options: Any) -> Llama:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where memory may not be locked
        return Llama(path, verbose=False, **{**OPTIONS, **options})


def _logits(llm: Llama) -> bytes:
    values = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(values, (llm.n_vocab(),)).tobytes()


def _run(llm: Llama, n: int = 4) -> list[bytes]:
    """Logits of a prompt of two micro-batches, and of some tokens behind it."""
    llm.reset()
    llm.eval(PROMPT)
    found = [_logits(llm)]
    for token in range(100, 100 + n):
        llm.eval([token])
        found.append(_logits(llm))
    return found


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[bytes]]:
    found = {}
    for kv in ("mixed:cold=q8_0,threshold=32,group=8", "f16"):
        with _open(model, kv=kv, stream_mode="resident") as llm:
            found[kv] = _run(llm)
    return found


@pytest.mark.parametrize("kv", ["mixed:cold=q8_0,threshold=32,group=8", "f16"])
@pytest.mark.parametrize("layers", [1, 4, N_LAYER, {"keep_first": 1, "keep_last": 1}])
@pytest.mark.parametrize("mode", ["direct", "prefetch"])
def test_the_bits_of_the_resident_run(
    model: Path, expected: dict[str, list[bytes]], mode: Any, layers: Any, kv: str
) -> None:
    with _open(model, kv=kv, stream_layers=layers, stream_mode=mode) as llm:
        assert _run(llm) == expected[kv]
        assert llm.streaming is not None
        stats = llm.streaming.stats()
        assert stats.mode == mode
        assert len(stats.layers) == (4 if isinstance(layers, dict) else layers)
        assert stats.n_passes == 6
        if len(stats.layers) > 3:  # a ring of three layers
            assert stats.bytes_read >= 5 * stats.bytes_pass
        assert 0 <= stats.share_waiting <= 1
        assert stats.rate > 0
        assert stats.bytes_ring == 0 if mode == "prefetch" else stats.bytes_ring > 0


def test_the_feed_forward_matrices_alone(model: Path, expected: dict[str, list[bytes]]) -> None:
    read = {}
    for layers in ("all", "ffn"):
        with _open(model, kv="f16", stream_layers=layers) as llm:
            assert _run(llm) == expected["f16"]
            assert llm.streaming is not None
            stats = llm.streaming.stats()
            assert stats.layers == tuple(range(N_LAYER))
            read[layers] = stats.bytes_pass
    assert read["ffn"] == pytest.approx(N_LAYER * 3 * 512 * 1024 * 18 // 32, rel=0.01)  # whole pages
    assert read["ffn"] < 0.8 * read["all"]


def test_plain_mmap_gives_the_same_bits(model: Path, expected: dict[str, list[bytes]]) -> None:
    with _open(model, kv="f16", stream_mode="mmap") as llm:
        assert _run(llm) == expected["f16"]
        assert llm.streaming is not None
        assert llm.streaming.stats().layers == ()


def test_memory_says_how_much_is_streamed(model: Path) -> None:
    with _open(model, kv="f16") as llm:
        assert llm.streaming is None
    with _open(model, kv="f16", memory="100GiB") as llm:
        assert llm.streaming is not None
        assert llm.streaming.stats().mode == "resident"
    with pytest.raises(ValueError, match="raise memory"):
        _open(model, kv="f16", memory="1MiB")
    with pytest.raises(ValueError, match="memory='much' is not a size"):
        _open(model, memory="much")
    with pytest.raises(ValueError, match="leave n_gpu_layers"):
        _open(model, stream_layers=2, n_gpu_layers=1)
    with pytest.raises(ValueError, match="stream_mode='fast'"):
        _open(model, stream_layers=2, stream_mode="fast")


def _vectors(llm: Llama) -> list[bytes]:
    context = EmbeddingContext(llm, read_model_file(llm.model_path), n_ctx=64, n_batch=32)
    pieces = [
        [InputSpan(PROMPT[:20], 0, False)],
        [InputSpan(PROMPT[20:], 20, True), InputSpan(PROMPT[:7], 0, True)],
    ]
    return [context.evaluate(each).tobytes() for each in pieces * 8]


@pytest.mark.parametrize("mode", ["direct", "prefetch"])
def test_a_context_for_embeddings_takes_turns_with_answers(
    model: Path, expected: dict[str, list[bytes]], mode: Any
) -> None:
    with _open(model, kv="f16", stream_mode="resident") as llm:
        vectors = _vectors(llm)
    with _open(model, kv="f16", stream_layers=4, stream_mode=mode) as llm:
        assert _run(llm) == expected["f16"]
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(_vectors, llm)
            for _ in range(8):
                assert _run(llm) == expected["f16"]
            assert found.result() == vectors
        assert _run(llm) == expected["f16"]


def test_a_context_for_embeddings_says_which_file(copy: Path) -> None:
    with _open(copy, kv="f16", stream_layers=N_LAYER) as llm:
        context = EmbeddingContext(llm, read_model_file(copy), n_ctx=64, n_batch=32)
        one = InputSpan(PROMPT[:20], 0, True)
        assert context.evaluate([one]).any()
        os.truncate(copy, 1 << 20)
        with pytest.raises(ModelReadError, match=r"copy\.gguf.*shorter"):
            context.evaluate([one])


@pytest.mark.parametrize("mode", ["direct", "prefetch"])
def test_a_file_cut_short_is_named(copy: Path, expected: dict[str, list[bytes]], mode: Any) -> None:
    whole = copy.read_bytes()
    with _open(copy, kv="f16", stream_layers=N_LAYER, stream_mode=mode) as llm:
        assert _run(llm) == expected["f16"]
        status = copy.stat()
        os.truncate(copy, len(whole) // 2)
        with pytest.raises(ModelReadError, match=r"copy\.gguf.*shorter"):
            _run(llm)
        with pytest.raises(ModelReadError, match=r"copy\.gguf.*shorter"):
            _run(llm)
        with copy.open("r+b") as file:
            file.write(whole)
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert _run(llm) == expected["f16"]  # and goes on as if nothing had been


def test_a_file_that_was_written_to_is_named(copy: Path) -> None:
    with _open(copy, kv="f16", stream_layers=N_LAYER) as llm:
        _run(llm)
        os.utime(copy)
        with pytest.raises(ModelReadError, match=r"copy\.gguf has been written to"):
            _run(llm)


def test_a_file_that_was_removed_is_read_on(copy: Path, expected: dict[str, list[bytes]]) -> None:
    with _open(copy, kv="f16", stream_layers=N_LAYER) as llm:
        copy.unlink()
        copy.write_bytes(b"another")
        assert _run(llm) == expected["f16"]


def test_from_a_ram_disk(model: Path, expected: dict[str, list[bytes]]) -> None:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("no RAM disk")
    path = Path(shutil.copy(model, memory / f"mixedkv-{os.getpid()}.gguf"))
    try:
        with _open(path, kv="f16", stream_layers=N_LAYER) as llm:
            assert _run(llm) == expected["f16"]
    finally:
        path.unlink()


def test_without_o_direct(model: Path, expected: dict[str, list[bytes]], library: Path) -> None:
    child = _child(model, "buffered", LD_PRELOAD=str(library), MIXEDKV_TEST_BUFFERED="1")
    out, err = child.communicate("go\n", timeout=300)
    assert child.returncode == 0, err
    assert out.split()[0] == "o_direct=False"
    assert err.count(f"{model} cannot be read past the page cache (O_DIRECT)") == 1
    assert bytes.fromhex(out.split()[1]) == expected["f16"][0]


def test_two_processes_on_one_file(model: Path, expected: dict[str, list[bytes]]) -> None:
    child = _child(model, "wait")
    _says(child, "ready")
    with _open(model, kv="f16", stream_layers=N_LAYER) as llm:
        assert _run(llm) == expected["f16"]
    out, err = child.communicate("go\n", timeout=300)
    assert child.returncode == 0, err
    assert bytes.fromhex(out.strip()) == expected["f16"][0]


def test_a_process_that_was_killed_leaves_nothing(copy: Path, expected: dict[str, list[bytes]]) -> None:
    child = _child(copy, "forever")
    _says(child, "pass")
    child.kill()
    child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL
    assert list(copy.parent.iterdir()) == [copy]
    with _open(copy, kv="f16", stream_layers=N_LAYER) as llm:
        assert _run(llm) == expected["f16"]


def test_memory_that_may_not_be_locked(model: Path, expected: dict[str, list[bytes]]) -> None:
    out, err = _child(model, "unlocked").communicate("go\n", timeout=300)
    assert bytes.fromhex(out.split()[-1]) == expected["f16"][0]
    assert err.count("are locked in memory") == 1
    assert "0 of " in err


def test_ctrl_c_ends_a_pass(model: Path) -> None:
    """In the middle of one llama_decode, whose rows are gone; the next one is whole."""
    many = {"n_batch": 256, "n_ubatch": 256}
    with _open(model, kv="f16", stream_layers=N_LAYER, **many) as llm:
        expected = _run(llm, 0)
        assert any(_interrupted_within(llm) for _ in range(100))
        assert _run(llm, 0) == expected


def _interrupted_within(llm: Llama) -> bool:
    """False: it came before or after llama_decode, where Python itself sees it."""
    timer = threading.Timer(0.02, signal.raise_signal, [signal.SIGINT])
    try:
        timer.start()
        while True:
            llm.reset()
            llm.eval(PROMPT * 6)
    except KeyboardInterrupt as error:
        return any(frame.name == "check" for frame in traceback.extract_tb(error.__traceback__))
    finally:
        timer.join()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Put before the system's, it fails where it is told to."""
    source, library = tmp_path / "fail.c", tmp_path / "fail.so"
    source.write_text(_FAILING)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.mark.needs("C compiler")
def test_a_disk_error_is_named(model: Path, library: Path) -> None:
    child = _child(model, "errors", LD_PRELOAD=str(library))
    out, err = child.communicate("go\n", timeout=300)
    assert child.returncode == 0, err
    assert out.splitlines()[-1] == f"{model} cannot be read at byte N: Input/output error"


def test_an_engine_says_which_file(copy: Path) -> None:
    llm = _open(copy, kv="f16", stream_layers=N_LAYER, n_seq_max=4, kv_unified=True)
    with llm, Engine(llm, parallel=2) as engine:
        engine.submit(PROMPT, max_tokens=2, temperature=0.0).result()
        os.truncate(copy, 1 << 20)
        answer = engine.submit(PROMPT[::-1], max_tokens=8, temperature=0.0)  # some layers are there already
        with pytest.raises(ModelReadError, match=r"copy\.gguf.*shorter"):
            answer.result()


_FAILING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/types.h>

static ssize_t fails(const char * name, int fd, void * to, size_t n, off_t at) {
    ssize_t (*real)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, name);
    if (getenv("MIXEDKV_TEST_FAILS")) {
        errno = EIO;
        return -1;
    }
    return real(fd, to, n, at);
}
static int opens(const char * name, const char * path, int flags, mode_t mode) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    if (flags & O_DIRECT && getenv("MIXEDKV_TEST_BUFFERED")) {
        errno = EINVAL;
        return -1;
    }
    return real(path, flags, mode);
}
static mode_t mode_of(int flags, va_list more) { return flags & O_CREAT ? va_arg(more, mode_t) : 0; }
int open(const char * path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    return opens("open", path, flags, mode_of(flags, more));
}
int open64(const char * path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    return opens("open64", path, flags, mode_of(flags, more));
}
ssize_t pread(int fd, void * to, size_t n, off_t at) { return fails("pread", fd, to, n, at); }
ssize_t pread64(int fd, void * to, size_t n, off_t at) { return fails("pread64", fd, to, n, at); }
"""


def _child(model: Path, what: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "support.children.streaming_child", str(model), what]
    return subprocess.Popen(
        command,
        cwd=TESTS,
        env={**os.environ, **environment},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _says(child: subprocess.Popen[str], what: str) -> None:
    assert child.stdout is not None
    if (line := child.stdout.readline().strip()) != what:
        _, err = child.communicate(timeout=300)  # it has ended
        raise AssertionError(f"{line!r}, then {child.returncode}: {err}")
