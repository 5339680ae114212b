"""Arguments of `Llama` that are misspelt, of another type, or do not go together: the message names them."""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine.engine import Engine
from mixedkv.llama_options import ChatOptions, CompletionOptions, LlamaOptions
from mixedkv.model.gguf_file import read_model_file
from support.servers import prefork

pytestmark = pytest.mark.core

TINY: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "verbose": False}


@pytest.mark.parametrize(
    ("name", "near"),
    [("n_cxt", "n_ctx"), ("n_thread", "n_threads"), ("kv_unifed", "kv_unified"), ("n_seqmax", "n_seq_max")],
)
def test_an_unknown_name_is_refused(name: str, near: str) -> None:
    with pytest.raises(TypeError, match=rf"no argument '{name}' \(did you mean {near}\?\)"):
        Llama(model_path(), **{name: 4096})


def test_a_name_like_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no argument 'zzzzzz': see help"):
        Llama(model_path(), zzzzzz=1)


@pytest.mark.parametrize("name", ["n_ctx", "n_batch", "n_ubatch", "n_threads", "n_gpu_layers", "seed"])
@pytest.mark.parametrize("value", ["4096", 4.5, True])
def test_a_number_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}={value!r}: use a whole number"):
        Llama(model_path(), **{name: value})


@pytest.mark.parametrize("name", ["n_ctx", "n_batch", "n_ubatch"])
def test_none_is_not_a_size(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}=None: use a whole number"):
        Llama(model_path(), **{name: None})


@pytest.mark.parametrize("name", ["n_ctx", "n_batch", "n_ubatch", "n_threads", "n_gpu_layers", "main_gpu"])
def test_a_number_beyond_llama_cpps_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={2**40}: use at most {2**31 - 1}"):
        Llama(model_path(), **{name: 2**40})


@pytest.mark.parametrize(
    ("value", "error"), [("x", TypeError), (True, TypeError), (-1, ValueError), (257, ValueError)]
)
def test_windows_are_a_number_of_sequences(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"n_windows={value!r}: use "):
        Llama(model_path(), n_windows=value, **TINY)


def test_an_adapter_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "poet.gguf")
    with pytest.raises(FileNotFoundError, match=r"poet\.gguf"):
        Llama(model_path(), lora_path=path, **TINY)


@pytest.mark.parametrize("n_ctx", [1, 300])
@pytest.mark.parametrize(("n_seq_max", "kv_unified"), [(1, False), (3, False), (3, True)])
def test_a_context_that_is_rounded_up_holds_what_it_says(
    n_ctx: int, n_seq_max: int, kv_unified: bool
) -> None:
    """llama.cpp rounds up to 256 tokens. What was evaluated behind n_ctx was not in `input_ids`."""
    options: dict[str, Any] = {"n_seq_max": n_seq_max, "kv_unified": kv_unified}
    with Llama(model_path(), **{**TINY, **options, "n_ctx": n_ctx}) as llm:
        assert len(llm.input_ids) == llm.n_ctx()
        n = llm.n_ctx() // (1 if kv_unified else n_seq_max)
        tokens = [5 + i % 100 for i in range(n)]
        llm.eval(tokens)
        assert llm.input_ids[: llm.n_tokens].tolist() == tokens


def test_a_batch_is_no_longer_than_the_context() -> None:
    with Llama(model_path(), n_batch=10**9, **TINY) as llm:
        assert llm.n_batch == len(llm.scores) == 256


def test_numbers_of_numpy_are_taken() -> None:
    with Llama(model_path(), n_ctx=np.int64(256), n_batch=np.int32(64), verbose=False) as llm:
        assert llm.n_ctx() == 256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_batch": 1, "n_ubatch": 1, "n_seq_max": 2}, "n_batch=1 is less than n_seq_max=2"),
        ({"n_batch": 2, "n_seq_max": 16, "kv_unified": True}, "n_batch=2 is less than n_seq_max=16"),
        ({"n_batch": 0}, "n_batch=0: use 1 or more"),
        ({"n_ctx": -1}, "n_ctx=-1: use 1 or more"),
        ({"attention_type": 9}, "attention_type=9: use a whole number from -1 to 1"),
        ({"rope_freq_base": float("nan")}, "rope_freq_base=nan: use a finite number"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Llama(model_path(), **{**TINY, **options})


@pytest.mark.parametrize("n_ubatch", [1, 3, 16])
def test_a_micro_batch_may_be_smaller(n_ubatch: int) -> None:
    with Llama(model_path(), n_batch=16, n_ubatch=n_ubatch, n_seq_max=16, kv_unified=True, **TINY) as llm:
        llm.eval(list(range(5, 45)))
        assert llm.n_tokens == 40


@pytest.mark.skipif(llama_cpp.llama_supports_gpu_offload(), reason="this build has a GPU")
def test_layers_for_a_gpu_that_is_not_there_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="n_gpu_layers=-1 has no effect") as seen:
        Llama(model_path(), n_gpu_layers=-1, **TINY).close()
    assert [warning.filename for warning in seen] == [__file__]


def test_a_context_beyond_training_is_warned_of() -> None:
    text = r"n_ctx=\d+ is more than the n_ctx_train=\d+ .* rope_freq_scale=0\."
    with pytest.warns(UserWarning, match=text) as seen:
        Llama(model_path(), n_ctx=n_ctx_train() * 2, n_threads=1, verbose=False).close()
    (warning,) = seen
    assert warning.filename == __file__


@pytest.mark.parametrize(
    "options", [{"n_ctx": 0}, {"n_ctx": 512}, {"rope_freq_scale": 0.5}, {"n_seq_max": 2}]
)
def test_others_are_not(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Llama(model_path(), **{**TINY, "n_ctx": n_ctx_train() * 2, **options}).close()


@pytest.mark.parametrize("n_seq_max", [1, 4])
def test_a_window_that_a_short_context_cannot_pay_for_is_narrower(n_seq_max: int) -> None:
    n_ctx = 512 * n_seq_max
    with pytest.warns(UserWarning, match="would take more than an F16 cache") as seen:
        llm = Llama(
            model_path(), kv="mixed:quality", n_ctx=n_ctx, n_seq_max=n_seq_max, n_threads=1, verbose=False
        )
    assert [warning.filename for warning in seen] == [__file__]
    with llm:
        assert 32 <= llm.kv.quantization_threshold < 256
        assert llm.kv.stats().saving >= 0
        llm.eval(list(range(5, 105)))


@pytest.mark.parametrize("command", [["run", "-p", "x", "-n", "1"], ["info"], ["chat", "-n", "1"]])
def test_the_command_line_warns_in_one_line(command: list[str]) -> None:
    done = prefork.run([*command, "--n-ctx", str(n_ctx_train() * 2)])
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in (done.stdout + done.stderr).splitlines() if "n_ctx_train=" in line)
    assert line.startswith("mixedkv: warning: ") or command == ["info"]


def n_ctx_train() -> int:
    return int(read_model_file(model_path()).get("context_length", 0))


@pytest.mark.parametrize("options", [{}, {"n_seq_max": 2}, {"kv_unified": True}])
def test_an_engine_says_how_to_make_its_model(options: dict[str, Any]) -> None:
    with Llama(model_path(), **TINY, **options) as llm:
        with pytest.raises(ValueError, match=r"Llama\(\.\.\., n_seq_max=16, kv_unified=True\)"):
            Engine(llm)
        llm.eval([1, 2])  # it is not the engine's


class _Hub:
    """huggingface_hub, as far as llama_cpp uses it, with one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ls(self, repo: str, recursive: bool) -> list[str]:
        return [f"{repo}/model.gguf"]

    def download(self, *, filename: str, **_: Any) -> str:
        return str(self.folder / filename)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    (tmp_path / "model.gguf").symlink_to(model_path())
    hub = _Hub(tmp_path)
    module, utils = types.ModuleType("huggingface_hub"), types.ModuleType("huggingface_hub.utils")
    module.HfFileSystem = lambda: hub  # type: ignore[attr-defined]
    module.hf_hub_download = hub.download  # type: ignore[attr-defined]
    utils.validate_repo_id = lambda name: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    return lambda: None


def test_from_pretrained_takes_our_arguments(hub: Callable[[], None]) -> None:
    class Mine(Llama):
        pass

    with Mine.from_pretrained("someone/some", "*.gguf", kv="mixed:balanced", **TINY) as llm:
        assert isinstance(llm, Mine)
        assert str(llm.kv.config).startswith("mixed")
    with pytest.raises(TypeError, match="did you mean n_ctx"):
        Llama.from_pretrained("someone/some", "*.gguf", n_cxt=4096)


def test_from_pretrained_is_typed_as_this_class() -> None:
    assert Llama.from_pretrained.__annotations__["return"] == "Self"


def test_types_name_the_arguments_of_the_calls() -> None:
    """`llama_options` says what type checkers accept."""
    for options, call, own in (
        (LlamaOptions, llama_cpp.Llama.__init__, inspect.signature(Llama.__init__).parameters),
        (CompletionOptions, llama_cpp.Llama.create_completion, ("self", "prompt", "stream")),
        (CompletionOptions, llama_cpp.Llama.__call__, ("self", "prompt", "stream")),
        (ChatOptions, llama_cpp.Llama.create_chat_completion, ("self", "messages", "stream")),
    ):
        taken = {name for name in inspect.signature(call).parameters if name not in own}
        assert options.__optional_keys__ == taken - {"kwargs"}
