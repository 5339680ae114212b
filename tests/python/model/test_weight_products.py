"""Products with weights by cpp/weights: near those in F64, with the same bits in any batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from mixedkv import _core
from support.children.weight_products_child import (
    ALL,
    CASES,
    HALVES,
    N_EXPERTS,
    N_FEWER,
    N_MANY,
    N_ROUTED,
    N_TOGETHER,
    REPACKED,
    TYPES,
    routes,
)

pytestmark = pytest.mark.full

N_ROWS, N_ELEMENTS = 77, 1280  # no whole number of panels; five units of the K types
N_BF16 = 64  # columns that are multiplied in BF16, where it is asked for
Products = dict[str, npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and columns of which some elements are far larger than the others."""
    random = np.random.default_rng(7)
    weights = random.standard_normal((N_ROWS, N_ELEMENTS), np.float32) / 30
    columns = random.standard_normal((N_ROUTED, N_ELEMENTS), np.float32)
    columns[:, ::97] *= 20
    path = tmp_path_factory.mktemp("weights") / "given.npz"
    np.savez(path, columns=columns, weights=weights)
    return path


@pytest.fixture(scope="module")
def products(given: Path) -> Callable[..., Products]:
    """What a process with this environment makes of it."""
    made: dict[str, Products] = {}

    def run(**environment: str) -> Products:
        key = str(environment)
        if key not in made:
            out = given.with_name(f"out{len(made)}.npz")
            arguments = [sys.executable, "-m", "support.children.weight_products_child", given, out]
            folder = Path(__file__).parents[1]
            subprocess.run(arguments, check=True, cwd=folder, env={**os.environ, **environment})
            made[key] = dict(np.load(out))
        return made[key]

    return run


def relative_error(got: npt.NDArray[np.floating], exact: npt.NDArray[np.floating]) -> float:
    return float(np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)))


def dequantised(rows: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.float64]:
    kind = gguf.GGMLQuantizationType[name]
    return gguf.quants.dequantize(rows.reshape(N_ROWS, -1), kind).astype(np.float64)


@pytest.mark.parametrize("name", TYPES)
def test_they_are_the_products_of_what_is_stored(
    name: str, given: Path, products: Callable[..., Products]
) -> None:
    """Only columns are rounded, to Q8_0, and sums. llama.cpp's products are no nearer to those in F64."""
    out, stock = products(), products(MIXEDKV_WEIGHTS="llama.cpp")
    columns = np.load(given)["columns"][:N_MANY]
    eight = gguf.GGMLQuantizationType.Q8_0
    rounded = gguf.quants.dequantize(gguf.quants.quantize(columns, eight), eight).astype(np.float64)
    weights = dequantised(out[name], name)
    got = out[f"{name} {N_MANY} 1"]
    assert relative_error(got, rounded @ weights.T) < 1e-4  # half a step of a few elements: a tie
    exact = columns.astype(np.float64) @ weights.T
    assert relative_error(got, exact) < min(0.02, 1.02 * relative_error(stock[f"{name} {N_MANY} 1"], exact))


@pytest.mark.parametrize("name", TYPES)
def test_a_column_has_the_same_bits_in_any_batch_with_any_threads(
    name: str, products: Callable[..., Products]
) -> None:
    out = products()
    for n_columns, n_threads in CASES:
        many = out[f"{name} {N_MANY} 1"]
        np.testing.assert_array_equal(out[f"{name} {n_columns} {n_threads}"], many[:n_columns])


@pytest.mark.parametrize("name", TYPES)
def test_in_bf16_products_of_many_columns_are_nearer(
    name: str, given: Path, products: Callable[..., Products]
) -> None:
    """Those of few columns, and of experts to which few go, are as they were."""
    if _core.version()["isa"] != "amx":
        pytest.skip("no AMX, or another body is forced")
    usual, out = products(), products(MIXEDKV_WEIGHTS="bf16")
    exact = np.load(given)["columns"][:N_MANY].astype(np.float64) @ dequantised(usual[name], name).T
    got, integers = out[f"{name} {N_MANY} 1"], usual[f"{name} {N_MANY} 1"]
    assert relative_error(got, exact) < 0.5 * relative_error(integers, exact)
    np.testing.assert_array_equal(got, out[f"{name} {N_MANY} 3"])
    np.testing.assert_array_equal(got[:, :N_FEWER], out[f"{name} {N_FEWER} together {N_MANY} 3"])
    n_whole = N_ROWS - N_ROWS % N_TOGETHER
    if f"{name} repacked {N_MANY} 1" in out:
        np.testing.assert_array_equal(out[f"{name} repacked {N_MANY} 1"], got[:, :n_whole])
    few = [f"{name} {n} {n_threads}" for n, n_threads in CASES if n < N_MANY]
    for key in few:
        np.testing.assert_array_equal(out[key], usual[key])
    for key in (key for key in usual if key.startswith(f"{name} routed")):
        n_tokens = int(key.split()[-2])
        experts = routes(n_tokens)
        are_many = (np.bincount(experts.ravel(), minlength=N_EXPERTS) >= N_BF16)[experts]
        assert n_tokens < N_MANY or 0 < np.mean(are_many) < 1
        column = np.arange(experts.size).reshape(experts.shape) // (experts.shape[1] if "True" in key else 1)
        n_rows = usual[key].shape[-1]
        rows = experts[:, :, None] * n_rows + np.arange(n_rows)
        in_bf16 = out[f"{name} {N_ROUTED} 1"][column[:, :, None], rows]
        np.testing.assert_array_equal(out[key], np.where(are_many[:, :, None], in_bf16, usual[key]))
    for half in HALVES:
        together = f"{half} {N_ROWS} together {N_MANY} 1"
        np.testing.assert_array_equal(out[together], usual[together])


@pytest.mark.parametrize("kv", ["mixed", "f16"])
@pytest.mark.parametrize("weights", ["fast", "bf16"])
def test_a_choice_that_cannot_be_followed_is_an_error(weights: str, kv: str) -> None:
    """With AMX and another body forced, or without AMX."""
    program = f"from mixedkv import Llama, bundled; Llama(str(bundled.model_path()), kv={kv!r})"
    environment = {**os.environ, "MIXEDKV_WEIGHTS": weights, "MIXEDKV_ISA": "scalar"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert f"MIXEDKV_WEIGHTS={repr(weights) if weights == 'fast' else weights}" in done.stderr
    assert "unset" in done.stderr


@pytest.mark.parametrize("weights", ["", "bf16", "llama.cpp"])
def test_rows_say_which_products_made_them(weights: str) -> None:
    """So that none is vouched for in a process with other products. In BF16 they promise no bits."""
    if weights == "bf16" and _core.version()["isa"] != "amx":
        pytest.skip("no AMX, or another body is forced")
    program = (
        "from mixedkv import Llama, bundled; llm = Llama(str(bundled.model_path())); llm.eval([1, 2]); "
        "print(llm.kv.setting_of(0, 1)); print(llm.kv.stats().bits_problem)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "MIXEDKV_WEIGHTS": weights},
        capture_output=True,
        text=True,
        check=True,
    )
    setting, problem = done.stdout.split("\n")[:2]
    assert ("products=" in setting) == bool(weights)
    assert f" products={weights} " in setting + " " or not weights
    assert problem.startswith("MIXEDKV_WEIGHTS=bf16 multiplies") == (weights == "bf16")


def test_products_that_follow_each_other_give_the_same_bits(products: Callable[..., Products]) -> None:
    """Those of the same columns are made together where their types agree."""
    out = products()
    for name in ALL:
        for n_columns, n_threads in CASES:
            alone = out[f"{name} {n_columns} {n_threads}"]
            for n_rows in (N_ROWS, N_FEWER):
                got = out[f"{name} {n_rows} together {n_columns} {n_threads}"]
                np.testing.assert_array_equal(got, alone[:, :n_rows])


@pytest.mark.parametrize("name", REPACKED)
def test_rows_that_llama_cpp_has_repacked_give_the_same_bits(
    name: str, products: Callable[..., Products]
) -> None:
    ours, stock = products(), products(MIXEDKV_WEIGHTS="llama.cpp")
    if f"{name} repacked 1 1" not in ours:
        pytest.skip("llama.cpp repacks no rows here")
    n_rows = N_ROWS - N_ROWS % N_TOGETHER
    for n_columns, n_threads in CASES:
        got = ours[f"{name} repacked {n_columns} {n_threads}"]
        np.testing.assert_array_equal(got, ours[f"{name} {N_MANY} 1"][:n_columns, :n_rows])
        theirs = stock[f"{name} repacked {n_columns} {n_threads}"]
        assert relative_error(got, theirs) < 0.03
        if name == "Q4_K":  # the columns of others are rounded alike, and sums may have the same order
            assert not np.array_equal(got, theirs)


@pytest.mark.parametrize("name", TYPES)
def test_columns_that_go_to_experts_have_the_bits_of_a_product_with_each(
    name: str, products: Callable[..., Products]
) -> None:
    """Where the rows are repacked too, and with one column for all experts of a token or one for each."""
    out, stock = products(), products(MIXEDKV_WEIGHTS="llama.cpp")
    n_rows = N_ROWS // N_EXPERTS // N_TOGETHER * N_TOGETHER
    for shared in (True, False):
        for n_tokens, n_threads in CASES:
            experts = routes(n_tokens)
            column = np.arange(experts.size).reshape(experts.shape)
            if shared:
                column //= experts.shape[1]
            rows = experts[:, :, None] * n_rows + np.arange(n_rows)
            expected = out[f"{name} {N_ROUTED} 1"][column[:, :, None], rows]
            for kind in ("routed", "routed repacked"):
                case = f"{name} {kind} {shared} {n_tokens} {n_threads}"
                if kind == "routed" or case in out:
                    np.testing.assert_array_equal(out[case], expected)
                    assert relative_error(out[case], stock[case]) < 0.03


@pytest.mark.parametrize("isa", ["avx512", "avxvnni", "avx2", "scalar"])
def test_all_instruction_sets_give_the_same_bits(isa: str, products: Callable[..., Products]) -> None:
    best = products()
    other = products(MIXEDKV_ISA=isa)
    for name, values in other.items():
        if name.split()[0] not in HALVES:  # not multiplied by all of them
            np.testing.assert_array_equal(values, best[name])


@pytest.mark.parametrize("name", TYPES)
def test_no_columns_of_quantised_rows_are_left_to_llama_cpp(
    name: str, products: Callable[..., Products]
) -> None:
    ours, stock = products(), products(MIXEDKV_WEIGHTS="llama.cpp")
    for n_columns, n_threads in CASES:
        case = f"{name} {n_columns} {n_threads}"
        assert not np.array_equal(ours[case], stock[case])  # two ways of summing


def rounded_to(kind: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    half = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(values, half), half).astype(np.float64)


@pytest.mark.parametrize("name", HALVES)
def test_rows_in_16_bits_with_columns_rounded_to_16_bits(
    name: str, given: Path, products: Callable[..., Products]
) -> None:
    """As llama.cpp rounds them, so that it does not matter who multiplies: single columns by AVX-512, and
    many by AMX, in parts of 8 bits."""
    ours, stock = products(), products(MIXEDKV_WEIGHTS="llama.cpp")
    arrays = np.load(given)
    exact = rounded_to(name, arrays["columns"][:N_MANY]) @ rounded_to(name, arrays["weights"]).T
    for n_columns, n_threads in CASES:
        case = f"{name} {n_columns} {n_threads}"
        assert relative_error(ours[case], exact[:n_columns]) < 1.5e-5
        assert relative_error(stock[case], exact[:n_columns]) < 1e-5
    few = f"{name} 7 2"  # columns that are left to llama.cpp
    np.testing.assert_array_equal(ours[few], stock[few])
    np.testing.assert_array_equal(ours[f"{name} {N_MANY} 3"], ours[f"{name} {N_MANY} 1"])
