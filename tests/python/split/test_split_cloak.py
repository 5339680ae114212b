"""A cloaked model answers as the plain one does, and its vectors are others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest

from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.errors import UnsupportedModelError
from mixedkv.model.gguf_copy import write_and_close
from mixedkv_split.client import SplitClient
from mixedkv_split.cloak import rotation
from mixedkv_split.export import Exported, export
from mixedkv_split.head import Head
from support.models.planted import plant
from support.servers import split_servers

pytestmark = pytest.mark.full

_SEED = 20240607
_RECALLS = [make_recall(seed, 20) for seed in range(8)]


def _as_f32(source: Path, path: Path) -> Path:
    """The same model with F32 matrices."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.reshape(tuple(tensor.shape)[::-1]).astype(np.float32))
    write_and_close(writer)
    return path


def _both(model: Path) -> tuple[Exported, Exported]:
    names = [
        model.with_name(f"{model.stem}.{part}") for part in ("head", "body", "cloaked.head", "cloaked.body")
    ]
    return export(model, *names[:2]), export(model, *names[2:], cloak=_SEED)


@contextmanager
def _client(parts: Exported, kv: str, precision: str = "f32") -> Iterator[SplitClient]:
    with (
        Head(parts.head, n_threads=1) as head,
        split_servers.running(parts.body, kv=kv) as server,
        SplitClient(head, server.address, precision=precision) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def recall(tmp_path_factory: pytest.TempPathFactory) -> tuple[Exported, Exported]:
    return _both(_as_f32(model_path(), tmp_path_factory.mktemp("cloak") / "recall.gguf"))


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Exported, Exported]:
    folder = tmp_path_factory.mktemp("cloak")
    planted = plant(model_path(), folder / "planted.gguf", seed=1, bias=10)
    return _both(_as_f32(planted, folder / "outliers.gguf"))


def _answers(client: SplitClient) -> list[str]:
    return ["".join(client.generate(recall.messages, max_tokens=24, temperature=0)) for recall in _RECALLS]


@pytest.mark.nightly
def test_the_recall_model_says_the_same(recall: tuple[Exported, Exported]) -> None:
    answers = []
    for parts in recall:
        with _client(parts, "f16") as client:
            answers.append(_answers(client))
    assert answers[0] == answers[1]
    right = [recall.fact.answer in answer for recall, answer in zip(_RECALLS, answers[1], strict=True)]
    assert sum(right) >= 7


def _log_p(client: SplitClient, n: int = 256) -> np.ndarray:
    """Of the next token, after each of the first tokens of the prompts: [4 n, n_vocab]."""
    rows = []
    for recall in _RECALLS[:4]:
        tokens = client.head.tokenizer.encode(recall.messages)[0][:n]
        with client.session() as session:
            for end in range(32, len(tokens) + 1, 32):
                rows.append(client.head.logits(session._evaluate(tokens[:end], 32)))
    logits = np.concatenate(rows).astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


_COLD = "threshold=32,group=8"  # most of the prompts is read as it was quantised


@pytest.mark.parametrize(
    ("model", "kv", "precision", "most"),
    [
        ("recall", "f16", "f32", 1e-7),
        ("recall", "f16", "f16", 1e-5),
        ("recall", f"mixed:compact,{_COLD}", "f32", 1e-3),
        ("recall", f"mixed:balanced,{_COLD}", "f32", 1e-5),
        ("recall", f"mixed:quality,{_COLD}", "f32", 1e-5),
        ("outliers", f"mixed:compact,{_COLD}", "f32", 1e-3),
    ],
)
@pytest.mark.nightly
def test_distributions_are_the_same(
    request: pytest.FixtureRequest, model: str, kv: str, precision: str, most: float
) -> None:
    found = []
    for parts in request.getfixturevalue(model):
        with _client(parts, kv, precision) as client:
            found.append(_log_p(client))
    plain, cloaked = found
    kld = (np.exp(plain) * (plain - cloaked)).sum(axis=1).mean()
    same = (plain.argmax(axis=1) == cloaked.argmax(axis=1)).mean()
    print(f"{model} {kv}, wire {precision}: KLD {kld:.1e}, {100 * same:.2f}% of {len(plain)} first choices")
    assert kld < most
    assert same > 0.98


@pytest.mark.parametrize("name", ["llama-64", "qwen2", "qwen3", "qwen3moe", "gemma"])
@pytest.mark.nightly
def test_other_architectures_say_the_same(name: str, tmp_path: Path) -> None:
    parts, cloaked = _both(split_servers.write(name, tmp_path))
    prompts = split_servers.random_prompts(10)
    answers = []
    for one in (parts, cloaked):
        with _client(one, "f16") as client:
            answers.append([list(_tokens(client, prompt)) for prompt in prompts])
    assert answers[0] == answers[1]


def _tokens(client: SplitClient, prompt: list[int]) -> list[int]:
    with client.session() as session:
        return list(session.generate_tokens(prompt, max_tokens=12, temperature=0))


@pytest.mark.by_model
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_norms_behind_a_layer_are_refused_by_name(name: str, tmp_path: Path) -> None:
    model = split_servers.write(name, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"cannot be cloaked: what blk\.0\.\w+ does|norm"):
        _both(model)
    with pytest.raises(ValueError, match="cloak=-1: use a seed"):
        export(model, tmp_path / "a", tmp_path / "b", cloak=-1)


def test_vectors_are_turned_and_as_long_as_before(recall: tuple[Exported, Exported]) -> None:
    plain, cloaked = recall
    with Head(plain.head, n_threads=1) as head, Head(cloaked.head, n_threads=1) as other:
        assert head.pair != other.pair
        tokens = list(range(100, 200))
        a, b = head.embed(tokens), other.embed(tokens)
        assert np.abs(np.linalg.norm(a, axis=1) - np.linalg.norm(b, axis=1)).max() < 1e-4
        cosines = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        assert np.abs(cosines).max() < 0.5
        assert np.abs(a @ rotation(head.width, _SEED) - b).max() < 1e-5
        assert np.abs(a @ rotation(head.width, _SEED + 1) - b).max() > 0.1
        with split_servers.running(cloaked.body) as server, pytest.raises(ValueError, match="another model"):
            SplitClient(head, server.address)
