"""Which layers are streamed, and what there is room for: no model is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mixedkv.errors import UnsupportedModelError
from mixedkv.model.gguf_file import ModelFile, TensorFacts, read_model_file
from mixedkv.native.memory import memory_room, own_memory
from mixedkv.sizes import parse_size
from mixedkv.streaming import streaming
from mixedkv.streaming.layer_choice import LayerSizes, choose_layers, no_room, parse_layers
from support.models.random_model import RandomModel

pytestmark = pytest.mark.full

SIZES = LayerSizes((100,) * 12, 50, frozenset({"attn_q"}))
ALL = 50 + 12 * 100


@pytest.mark.parametrize("room", range(350, ALL + 200, 50))
def test_auto_keeps_what_fits(room: int) -> None:
    streamed = choose_layers(SIZES, "auto", room)
    assert SIZES.in_memory(streamed) <= room
    n = len(streamed)
    assert n == 0 or SIZES.in_memory(streamed[1:]) > room or n <= 3  # a ring of one layer or two is smaller
    assert len(set(streamed)) == n
    assert set(streamed) <= set(range(12))
    if n <= 10:
        assert not {0, 11} & set(streamed)


def test_auto_spreads_them() -> None:
    assert choose_layers(SIZES, 5, ALL) == [2, 4, 6, 8, 10]


def test_asked_for() -> None:
    assert choose_layers(SIZES, {"keep_first": 8, "keep_last": 2}, ALL) == [8, 9]
    assert choose_layers(SIZES, {"keep_last": 9}, ALL) == [0, 1, 2]
    assert choose_layers(SIZES, 12, ALL) == list(range(12))
    assert choose_layers(SIZES, 0, ALL) == []
    assert choose_layers(SIZES, "all", ALL) == choose_layers(SIZES, "ffn", ALL) == list(range(12))


@pytest.mark.parametrize(
    "asked", [-1, 13, True, "most", {"keep": 1}, {"keep_first": 13}, {"keep_first": -1}, 1.5]
)
def test_what_is_no_choice(asked: object) -> None:
    with pytest.raises(ValueError, match=r"stream_layers=.*12 layers"):
        choose_layers(SIZES, asked, ALL)  # type: ignore[arg-type]


def test_too_little_memory_is_said() -> None:
    with pytest.raises(ValueError, match=r"350 B; there is room for 349 B: raise memory"):
        choose_layers(SIZES, "auto", 349)


def test_the_words_of_the_command_line() -> None:
    assert parse_layers("auto") == "auto"
    assert parse_layers("12") == 12
    assert [parse_layers(text) for text in ("all", "ffn")] == ["all", "ffn"]
    assert parse_layers("keep_first=8,keep_last=2") == {"keep_first": 8, "keep_last": 2}
    for text in ("", "some", "keep_first=", "keep_first=8;keep_last=2", "-1"):
        with pytest.raises(ValueError, match="not a choice of layers"):
            parse_layers(text)
    assert parse_size("1.5GiB") == 3 << 29
    assert [parse_size(text) for text in ("4096", "2 mb", ".5k")] == [4096, 2_000_000, 512]
    for wrong in ("much", "5TG", "GiB", "1.2.3G", "-1", "9" * 400):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(wrong)


def test_sizes_come_from_the_header(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    RandomModel(n_layer=3, n_embd=64, n_head=2, n_head_kv=1, head_size=32, n_ff=64, kind="q4_0").write(path)
    sizes = LayerSizes.of(read_model_file(path))
    assert sizes.layers == (64 * (64 + 32 + 32 + 64 + 3 * 64) * 18 // 32,) * 3
    assert sizes.rest == 2 * (272 * 64 * 18 // 32) + 7 * 64 * 4


def test_feed_forward_matrices_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    RandomModel(n_layer=3, n_embd=64, n_head=2, n_head_kv=1, head_size=32, n_ff=64, kind="q4_0").write(path)
    whole, ffn = (LayerSizes.of(read_model_file(path), part) for part in ("", "ffn_"))
    assert ffn.layers == (64 * 3 * 64 * 18 // 32,) * 3
    assert ffn.rest + sum(ffn.layers) == whole.rest + sum(whole.layers)
    assert ffn.matrices == {"ffn_gate", "ffn_up", "ffn_down"}


def test_routed_experts_are_apart() -> None:
    tensors = (
        TensorFacts("blk.0.ffn_up_exps.weight", (5, 5, 4), 24, 100, 0),
        TensorFacts("blk.0.attn_q.weight", (5, 2), 24, 10, 128),
    )
    file = ModelFile(Path("moe.gguf"), {"general.architecture": "x", "x.block_count": 1}, 1, 100, tensors)
    sizes = LayerSizes.of(file)
    assert (sizes.layers, sizes.rest, sizes.routed) == ((10,), 0, 100)


def test_a_system_that_does_not_say_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_room(tmp_path, tmp_path) is None
    assert own_memory(tmp_path) == 0
    monkeypatch.setattr(streaming, "memory_room", lambda: None)
    with pytest.raises(ValueError, match="memory is missing"):
        streaming._room(None)
    assert streaming._room("100GiB") > 99 << 30


@pytest.mark.parametrize(
    ("n", "streamed"),
    [
        (1, [6]),
        (2, [3, 8]),
        (3, [2, 6, 9]),
        (10, list(range(1, 11))),
        (11, list(range(1, 12))),
        (12, list(range(12))),
    ],
)
def test_the_last_layer_goes_before_the_first_and_both_after_the_others(n: int, streamed: list[int]) -> None:
    assert choose_layers(SIZES, n, ALL) == streamed


def test_a_model_of_two_layers_has_no_layers_between() -> None:
    two = LayerSizes((100, 100), 50, frozenset({"attn_q"}))
    assert [choose_layers(two, n, 1000) for n in range(3)] == [[], [1], [0, 1]]


def test_as_many_may_be_kept_as_there_are() -> None:
    assert choose_layers(SIZES, {"keep_first": 6, "keep_last": 6}, ALL) == []
    assert choose_layers(SIZES, {"keep_first": 0, "keep_last": 0}, ALL) == list(range(12))
    assert choose_layers(SIZES, {}, ALL) == list(range(12))
    for asked in ({"keep_first": 7, "keep_last": 6}, {"keep_last": -1}, {"keep_first": "1"}):
        with pytest.raises(ValueError, match="with as many at most"):
            choose_layers(SIZES, asked, ALL)  # type: ignore[arg-type]


def test_the_ring_has_three_of_the_largest_layers_that_are_read() -> None:
    sizes = LayerSizes((10, 400, 30, 20, 50), 7, frozenset({"attn_q"}))
    assert [sizes.in_memory(read) for read in ([], [2], [2, 3], [0, 2, 3, 4])] == [
        517,  # nothing is read
        517,  # a ring of one layer has as much as the layer
        7 + 460 + 2 * 30,
        7 + 400 + 3 * 50,
    ]


def test_what_fits_exactly_fits() -> None:
    needed = SIZES.in_memory([2, 4, 6, 8, 10])
    assert choose_layers(SIZES, 5, needed) == [2, 4, 6, 8, 10]
    with pytest.raises(ValueError, match="there is room for 999 B"):
        choose_layers(SIZES, 5, needed - 51)
    with pytest.raises(ValueError, match="there is room for 0 B"):
        choose_layers(SIZES, 5, -1)


def test_the_pattern_has_the_matrices_of_the_streamed_layers_alone() -> None:
    sizes = LayerSizes((1,) * 12, 0, frozenset({"attn_q", "ffn_up"}))
    pattern = re.compile(sizes.pattern([1, 11]))
    found = [
        name
        for il in (0, 1, 11, 12)
        for name in (f"blk.{il}.attn_q.weight", f"blk.{il}.ffn_up.weight", f"blk.{il}.attn_qq.weight")
        if pattern.match(name)
    ]
    assert found == [f"blk.{il}.{name}.weight" for il in (1, 11) for name in ("attn_q", "ffn_up")]


def test_layers_that_are_not_loaded_and_vectors_are_not_streamed() -> None:
    tensors = (
        TensorFacts("blk.0.attn_q.weight", (5, 2), 24, 10, 0),
        TensorFacts("blk.0.attn_q.bias", (5, 2), 24, 20, 64),
        TensorFacts("blk.0.attn_norm.weight", (5,), 24, 40, 128),
        TensorFacts("blk.1.attn_q.weight", (5, 2), 24, 80, 192),  # an MTP layer behind the model's
    )
    about = {"general.architecture": "x", "x.block_count": 2, "x.nextn_predict_layers": 1}
    sizes = LayerSizes.of(ModelFile(Path("mtp.gguf"), about, 1, 100, tensors))
    assert (sizes.layers, sizes.rest, sizes.matrices) == ((10,), 60, {"attn_q"})
    with pytest.raises(UnsupportedModelError, match=r"no layers with matrices ffn_\* to stream"):
        LayerSizes.of(ModelFile(Path("mtp.gguf"), about, 1, 100, tensors), "ffn_")
    with pytest.raises(UnsupportedModelError, match="no layers to stream"):
        LayerSizes.of(ModelFile(Path("none.gguf"), about, 1, 100, ()))


def test_what_is_needed_is_rounded_up_and_what_there_is_is_not() -> None:
    """Whoever gives as much as the error says has enough."""
    n = (1 << 30) + (5 << 20)
    assert no_room("the weights", n, n).startswith("the weights are 1.1 GiB; there is room for 1.0 GiB: ")
