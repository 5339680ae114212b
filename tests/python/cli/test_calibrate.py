"""`mixedkv calibrate`, the file that it writes, and what is refused without it or with another one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama, MixedKVConfig
from mixedkv.bench.harness import sample_text
from mixedkv.bundled import model_path
from mixedkv.cli.main import main
from mixedkv.config import parse_kv
from mixedkv.errors import InvalidModelFileError
from mixedkv.model.footprint import ModelShape, footprint, model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.value_bases import ValueBasis, read_bases, sidecar_of, value_errors, write_bases
from mixedkv.store.identity import Identity
from support import planted

KV = "mixed:cold_k=lm4,cold_v=lm3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated copy of the bundled model."""
    path = tmp_path_factory.mktemp("calibrated") / "model.gguf"
    shutil.copy(model_path(), path)
    assert main(["calibrate", "-m", str(path), "--tokens", "2048", "--n-ctx", "1024", "--threads", "1"]) == 0
    return path


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    """The model, and a sidecar that a test may spoil."""
    path = tmp_path / "model.gguf"
    path.symlink_to(model)
    shutil.copy(sidecar_of(model), sidecar_of(path))
    return path


def open_(path: Path, kv: str = KV) -> Llama:
    return Llama(path, kv=kv, n_ctx=768, n_threads=1, verbose=False, logits_all=True)


def shape_of(path: Path) -> ModelShape:
    return model_shape(read_model_file(path))


def log_p(path: Path, kv: str, tokens: list[int]) -> np.ndarray:
    with open_(path, kv) as llm:
        llm.eval(tokens)
        logits = llm.scores[: len(tokens)].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_three_and_a_half_bits_are_better_than_q4_0(model: Path) -> None:
    """On text that was not calibrated with; without a window, which is the same for both."""
    with open_(model) as llm:

        def tokenize(text: str) -> list[int]:
            return llm.tokenize(text.encode(), special=True)

        tokens = tokenize(sample_text.document(3, 760, lambda text: len(tokenize(text))))[:760]
        assert llm.kv.layers[0].type_v == "lm3"
    window = "threshold=0,sinks=0,draft=0"
    want = log_p(model, "f16", tokens)
    kld = {
        kv: float((np.exp(want) * (want - log_p(model, kv, tokens))).sum(axis=1).mean())
        for kv in (f"{KV},{window}", "q4_0", f"mixed:cold_k=lm4,cold_v=q8_0,{window}")
    }
    calibrated, q4_0, keys_alone = kld.values()
    assert calibrated < q4_0
    assert keys_alone < calibrated, "2.75 bits are not for nothing: values are stored in them"


def test_a_budget_spends_what_lm3_saves(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Down to 3.5 bits, and with as many bytes as before K is finer: the same told and made."""
    n_ctx, shape = 4096, shape_of(model)
    least, lm4 = (footprint(shape, parse_kv(spec), n_ctx).bytes for spec in (KV, "mixed:cold=lm4"))
    for budget in (least, lm4):
        kv = f"mixed:budget={budget}"
        with Llama(model, kv=kv, n_ctx=n_ctx, n_threads=1, verbose=False) as llm:
            chosen, taken = llm.kv.config, llm.kv.stats().bytes_total
        assert taken <= budget
        assert chosen == MixedKVConfig.for_budget(model, n_ctx, budget)
        assert main(["info", "-m", str(model), "--n-ctx", str(n_ctx), "--kv", kv]) == 0
        assert str(chosen) in capsys.readouterr().out
        types_k, types_v = zip(*(chosen.types_of(layer.il) for layer in shape.layers), strict=True)
        assert set(types_v) == {"lm3"}
        assert set(types_k) <= ({"lm4"} if budget == least else {"q5_0", "q5_1"})
    assert str(MixedKVConfig.for_budget(model_path(), n_ctx, lm4)) == "mixed:cold=lm4"
    with pytest.raises(ValueError, match="the smallest cache takes"):
        MixedKVConfig.for_budget(model_path(), n_ctx, int(0.9 * least))


def test_the_error_of_lm3_is_in_the_file(model: Path) -> None:
    """Of values of another text, in the first layer, which depend on no other's rounding."""
    rows = {}
    for kv in ("f16", f"{KV},threshold=0,sinks=0,draft=0"):
        with open_(model, kv) as llm:
            text = sample_text.document(5, 700, lambda text: len(llm.tokenize(text.encode(), special=True)))
            llm.eval(llm.tokenize(text.encode(), special=True)[:700])
            rows[kv] = llm.kv.layer(0).v(basis="model").astype(np.float64)
    want, got = rows.values()
    error = float(((got - want) ** 2).mean() / (want**2).mean())
    assert error == pytest.approx(value_errors(model)[0], rel=0.25)


def test_a_budget_goes_without_a_file_that_is_damaged(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    sidecar = sidecar_of(copied)
    sidecar.write_bytes(sidecar.read_bytes()[:-64])
    budget = footprint(shape_of(copied), parse_kv("mixed:cold=lm4"), 1024).bytes
    assert str(MixedKVConfig.for_budget(copied, 1024, budget)) == "mixed:cold=lm4"
    assert "a budget has no lm3 until `mixedkv calibrate" in caplog.text


def test_the_bases_are_part_of_the_identity(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.symlink_to(model)
    text = tmp_path / "text"
    text.write_text("Another text altogether, which says the same again and again. " * 60)
    assert main(["calibrate", "-m", str(other), "--text", str(text), "--threads", "1"]) == 0
    digests = []
    for path in (model, model, other):
        with open_(path) as llm:
            digests.append(Identity.of(llm).digest)
    assert digests[0] == digests[1] != digests[2]


def test_directions_are_those_of_the_values() -> None:
    """Of falling variance in each block of 64, decorrelated and of unit size."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((4000, 1, 128)) @ rng.standard_normal((128, 128))
    moments = np.einsum("thi,thj->hij", values, values) / len(values)
    basis = ValueBasis.of(moments)
    assert not basis.problem()
    assert (np.diff(basis.scales.reshape(2, 64), axis=1) <= 0).all()
    first, second = basis.scales[0].reshape(2, 64)
    assert (first >= second).all(), "dealt out in turns"
    assert (second[:-1] >= first[1:]).all()
    turned = basis.directions[0] @ moments[0] @ basis.directions[0].T
    assert np.allclose(turned, np.diag(basis.scales[0] ** 2), atol=1e-3 * turned.max())


def test_values_that_do_not_vary_have_a_basis() -> None:
    basis = ValueBasis.of(np.zeros((2, 64, 64)))
    assert not basis.problem()
    assert (basis.scales == 1).all()


def test_the_file_has_the_models_name() -> None:
    names = [sidecar_of(name).name for name in ("a.b.gguf", "q2.5-model", "q2.6-model")]
    assert names == ["a.b.kv.gguf", "q2.5-model.kv.gguf", "q2.6-model.kv.gguf"]


def test_without_a_sidecar(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.symlink_to(model)
    with pytest.raises(FileNotFoundError, match=r"kv\.gguf is not there: run `mixedkv calibrate -m "):
        open_(path)


def test_of_another_model(copied: Path, tmp_path: Path) -> None:
    other = planted.plant(model_path(), tmp_path / "other.gguf", 1)
    shutil.copy(sidecar_of(copied), sidecar_of(other))
    with pytest.raises(InvalidModelFileError, match=r"is of another model than .*: run `mixedkv cal"):
        open_(other)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_cut(copied: Path, share: float) -> None:
    sidecar = sidecar_of(copied)
    data = sidecar.read_bytes()
    sidecar.write_bytes(data[: int(share * len(data))])
    with pytest.raises(InvalidModelFileError, match=r"empty|truncated"):
        open_(copied)


def test_a_model_is_no_sidecar(copied: Path) -> None:
    shutil.copy(model_path(), sidecar_of(copied))
    with pytest.raises(InvalidModelFileError, match="no bases of values that this version can read"):
        open_(copied)


def test_flipped_bit(copied: Path) -> None:
    sidecar = sidecar_of(copied)
    data = bytearray(sidecar.read_bytes())
    data[-1000] ^= 1
    sidecar.write_bytes(data)
    with pytest.raises(InvalidModelFileError, match="damaged, its checksum is another"):
        open_(copied)


def _stretched(basis: ValueBasis) -> ValueBasis:
    return ValueBasis(basis.directions * np.float32(1.01), basis.scales)


def _nan(basis: ValueBasis) -> ValueBasis:
    return ValueBasis(basis.directions, np.full_like(basis.scales, np.nan))


def _negative(basis: ValueBasis) -> ValueBasis:
    return ValueBasis(basis.directions, -basis.scales)


def _smaller(basis: ValueBasis) -> ValueBasis:
    return ValueBasis(basis.directions[:, :32, :32], basis.scales[:, :32])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_stretched, "its directions are not orthonormal"),
        (_nan, "numbers that are not finite"),
        (_negative, "a scale is not positive"),
        (_smaller, "its directions are not orthonormal"),
    ],
)
def test_forged(copied: Path, change: Callable[[ValueBasis], ValueBasis], message: str) -> None:
    """Its checksum is right, its content is not."""
    layers = dict(read_bases(copied).layers)
    layers[2] = change(layers[2])
    write_bases(copied, layers, 1)
    with pytest.raises(InvalidModelFileError, match=f"the basis of layer 2 is wrong, .*{message}"):
        open_(copied)


def test_a_layer_is_missing(copied: Path) -> None:
    layers = dict(read_bases(copied).layers)
    del layers[3]
    write_bases(copied, layers, 1)
    with pytest.raises(ValueError, match="layer 3 has values, and no basis for them"):
        open_(copied)


def test_heads_of_another_size(copied: Path) -> None:
    eye = np.eye(32, dtype=np.float32)[None]
    layers = dict.fromkeys(range(6), ValueBasis(eye, np.ones((1, 32), np.float32)))
    write_bases(copied, layers, 1)
    with pytest.raises(ValueError, match=r"layer 0 has 2 KV heads .* of 64 elements, .* 1 of 32"):
        open_(copied)


def test_too_little_text(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("A few words.")
    assert main(["calibrate", "-m", str(copied), "--text", str(text)]) == 2
    assert "tokens: use one of 512 at least" in capsys.readouterr().err


def test_heads_that_lm3_does_not_divide(
    zoo_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "-m", str(zoo_path("llama-96"))]) == 2
    assert "values of 96 elements, and lm3 packs 64" in capsys.readouterr().err
