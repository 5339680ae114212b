"""What the weights say of the layers whose keys matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mixedkv.bundled import model_path
from mixedkv.model.footprint import ModelShape, model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.score_noise import score_noise
from support.planted import plant


def shape_of(path: Path) -> ModelShape:
    return model_shape(read_model_file(path))


def test_the_last_layer_of_the_bundled_model_matters_most() -> None:
    """As `bench sensitivity` finds: docs/benchmarks.md."""
    noise = score_noise(shape_of(model_path()))
    assert sum(noise.values()) == pytest.approx(6)
    assert max(noise, key=noise.__getitem__) == 5


@pytest.mark.parametrize("name", ["bundled", "qwen3", "qwen2vl"])
def test_outliers_change_nothing(zoo_path: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Keys are equalised: rows and norms of Q and K, and biases of Q."""
    path = model_path() if name == "bundled" else zoo_path(name)
    planted = plant(path, tmp_path / "planted.gguf", seed=1)
    assert score_noise(shape_of(planted)) == pytest.approx(score_noise(shape_of(path)), rel=0.02)


@pytest.mark.parametrize("name", ["deepseek2"])
def test_layers_are_alike_where_nothing_is_known(zoo_path: Callable[[str], Path], name: str) -> None:
    assert score_noise(shape_of(zoo_path(name))) == {}


def test_a_shape_without_a_file() -> None:
    shape = replace(shape_of(model_path()), path=None)
    assert score_noise(shape) == {}
