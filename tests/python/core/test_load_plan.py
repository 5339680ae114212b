"""What a `Llama` loads is decided before anything is loaded: no test here makes a context."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from mixedkv.config import parse_kv
from mixedkv.errors import UnsupportedModelError
from mixedkv.load_plan import LoadArguments, LoadPlan, find_path
from support.models import zoo

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = tmp_path_factory.mktemp("plan") / "llama-64.gguf"
    zoo.make("llama-64").write(model)
    return str(model)


def plan(path: str, *, options: dict[str, Any] | None = None, **given: Any) -> LoadPlan:
    return LoadPlan.of(LoadArguments(**{"n_ctx": 1024, **given}, options=options or {}), path)


def test_a_plan_says_what_the_base_class_is_given(path: str) -> None:
    made = plan(path, kv="q8_0", options={"n_threads": 3})
    assert made.setting == parse_kv("q8_0")
    assert (made.base["n_ctx"], made.base["n_threads"], made.base["flash_attn"]) == (1024, 3, True)
    assert (made.base["type_k"], made.base["type_v"]) == (8, 8)
    assert made.base["verbose"] is False
    assert made.streaming is made.fit is None
    assert made.warnings == ()


@pytest.mark.parametrize(
    ("n_ctx", "n_seq_max", "kv_unified", "made"),
    [(300, 1, False, 512), (900, 3, False, 1536), (900, 3, True, 1024)],
)
def test_a_context_is_what_llama_cpp_makes_of_it(
    path: str, n_ctx: int, n_seq_max: int, kv_unified: bool, made: int
) -> None:
    planned = plan(path, kv="f16", n_ctx=n_ctx, n_seq_max=n_seq_max, kv_unified=kv_unified)
    assert (planned.n_ctx, planned.base["n_ctx"]) == (n_ctx, made)


def test_a_batch_is_no_larger_than_the_context(path: str) -> None:
    assert plan(path, kv="f16", options={"n_batch": 4096}).base["n_batch"] == 1024


def test_planning_changes_no_argument(path: str) -> None:
    options = {"n_batch": 4096, "n_gpu_layers": 0}
    asked = LoadArguments(kv="mixed", n_ctx="fit", memory="6GiB", stream_layers=1, options=options)
    before = copy.deepcopy(asked)
    assert LoadPlan.of(asked, path) != LoadPlan.of(LoadArguments(kv="f16", options={}), path)
    assert asked == before
    assert options == {"n_batch": 4096, "n_gpu_layers": 0}


def test_a_window_that_is_too_wide_is_said_and_not_warned_of(
    path: str, recwarn: pytest.WarningsRecorder
) -> None:
    made = plan(path, kv="mixed:threshold=960,group=64", n_ctx=1024)
    assert made.setting != parse_kv("mixed:threshold=960,group=64")
    assert "would take more than an F16 cache" in made.warnings[0]
    assert not list(recwarn)


def test_streamed_layers_are_planned(path: str) -> None:
    made = plan(path, kv="f16", stream_layers=1)
    assert made.streaming is not None
    assert (made.streaming.mode, len(made.streaming.layers)) == ("direct", 1)
    assert made.streaming.pattern
    assert made.base["n_batch"] == made.base["n_ubatch"] == 1024
    own = plan(path, kv="f16", stream_layers=1, options={"n_batch": 128})
    assert own.base["n_batch"] == 128


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"n_seq_max": 0}, ValueError, "n_seq_max"),
        ({"n_rs_seq": 65}, ValueError, "n_rs_seq"),
        ({"n_windows": 1.5}, TypeError, "n_windows"),
        ({"content_tokens": "no"}, ValueError, "content_tokens='no': use one of text, special"),
        ({"kv": "f16", "type_k": 8}, ValueError, "both choose the cache"),
        ({"options": {"n_batch": 0}}, ValueError, "n_batch"),
        ({"options": {"n_threads": "two"}}, TypeError, "n_threads"),
    ],
)
def test_an_argument_is_refused_before_a_file_is_opened(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        LoadArguments(**{"options": {}, **given})


def test_what_the_file_lacks_is_refused(path: str) -> None:
    with pytest.raises(UnsupportedModelError, match="has no MTP layers"):
        plan(path, load_mtp=True)
    with pytest.raises(ValueError, match="flash_attn=False does not go with"):
        plan(path, kv="mixed", flash_attn=False)
    with pytest.raises(ValueError, match="stream_mode='no'"):
        plan(path, stream_mode="no")


def test_a_path_is_a_file_that_is_there(path: str, tmp_path: Path) -> None:
    assert find_path(Path(path)) == path
    with pytest.raises(FileNotFoundError):
        find_path(tmp_path / "none.gguf")
