"""What users of llama-cpp-python do goes on working on a mixed cache."""

from __future__ import annotations

import json
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama, MixedKVConfig
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.constrain.constraint import constrain
from mixedkv.errors import ClosedError
from support.models import zoo

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

RECALL = make_recall(seed=52_001, n_sentences=30, where=0.2)
CHAT = {"temperature": 0.0, "max_tokens": 40}
TEXT = "Mira's kite is teal. Question: What color is Mira's kite? Answer:"


def open_llama(kv: object = "mixed", **options: object) -> Llama:
    return Llama(model_path(), kv=kv, **{"n_ctx": 1024, "verbose": False, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    with open_llama() as llm:
        yield llm


def test_is_a_llama_with_a_mixed_cache_by_default() -> None:
    with Llama(model_path(), verbose=False) as llm:
        assert isinstance(llm, llama_cpp.Llama)
        assert llm.kv.config == MixedKVConfig()
        assert llm.kv.stats().mixed


def test_chat_with_the_template_of_the_file(llm: Llama) -> None:
    answer = llm.create_chat_completion(RECALL.messages, **CHAT)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": RECALL.fact.answer}
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_streaming_gives_the_same_text_in_pieces(llm: Llama) -> None:
    chunks = [
        chunk["choices"][0]["delta"].get("content", "")
        for chunk in llm.create_chat_completion(RECALL.messages, stream=True, **CHAT)
    ]
    assert "".join(chunks) == RECALL.fact.answer
    assert len([chunk for chunk in chunks if chunk]) > 3


def test_raw_prompt_and_template_agree(llm: Llama) -> None:
    assert llm(RECALL.prompt, **CHAT)["choices"][0]["text"] == RECALL.fact.answer
    assert RECALL.fact.answer in llm(RECALL.text, **CHAT)["choices"][0]["text"]


def test_grammar(llm: Llama) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= " " ("red" | "teal") "!"', verbose=False)
    assert llm(TEXT, grammar=grammar, **CHAT)["choices"][0]["text"] in (" teal!", " red!")


def test_a_schema_is_followed(llm: Llama) -> None:
    code = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    for _ in range(2):  # a new processor for each answer
        answer = llm.create_chat_completion(
            RECALL.messages, logits_processor=constrain(llm, "json_schema", schema), **CHAT
        )
        assert json.loads(answer["choices"][0]["message"]["content"])["code"] <= 99
        assert answer["choices"][0]["finish_reason"] == "stop"
    red = constrain(llm, "regex", " (red|teal)!")
    assert llm(TEXT, logits_processor=red, **CHAT)["choices"][0]["text"] in (" teal!", " red!")


def test_a_grammar_that_nothing_completes_ends_the_answer(
    llm: Llama, caplog: pytest.LogCaptureFixture
) -> None:
    endless = constrain(llm, "gbnf", 'root ::= "ab" x\nx ::= x "b"')
    assert llm(TEXT, logits_processor=endless, **CHAT)["choices"][0]["text"] in ("ab", "")
    assert "gbnf: no token of this model" in caplog.text


def test_logits_processors(llm: Llama) -> None:
    (expected,) = llm.tokenize(b"7", add_bos=False)

    def only_sevens(_tokens: np.ndarray, scores: np.ndarray) -> np.ndarray:
        out = np.full_like(scores, -np.inf)
        out[expected] = 0
        return out

    processors = llama_cpp.LogitsProcessorList([only_sevens])
    for bias in (None, {expected: 1.0}):  # llama_cpp would use neither
        answer = llm(TEXT, logits_processor=processors, logit_bias=bias, temperature=0.0, max_tokens=5)
        assert answer["choices"][0]["text"] == "77777"


def test_a_prompt_may_have_what_a_handler_of_images_evaluated(llm: Llama) -> None:
    llm.reset()
    llm.eval(llm.tokenize(TEXT.encode()))
    text = llm.input_ids[: llm.n_tokens].tolist()
    expected = llm(text, **CHAT)["choices"][0]["text"]
    llm.reset()
    llm.eval(text)
    llm.input_ids[3] = 2**30  # what it leaves there
    assert llm(llm.input_ids[: llm.n_tokens].tolist(), **CHAT)["choices"][0]["text"] == expected


def test_the_text_of_a_long_token_is_whole(tmp_path: Path) -> None:
    """llama_cpp has room for 32 bytes."""
    path = zoo.write_vocabulary(tmp_path / "v.gguf", "llama", ["-" * 64])
    with Llama(path, vocab_only=True, verbose=False) as llm:
        for detokenize in (llm.detokenize, llm.tokenizer().detokenize):
            assert detokenize([0, 0]) == b"-" * 128
        tokenizer = llm.tokenizer()
    for use in (lambda: tokenizer.detokenize([0]), lambda: tokenizer.tokenize(b"-")):
        with pytest.raises(ClosedError):
            use()


def test_stopping_criteria_and_stop_strings(llm: Llama) -> None:
    stop = llama_cpp.StoppingCriteriaList([lambda tokens, _logits: len(tokens) >= 30])
    llm(TEXT, stopping_criteria=stop, temperature=0.0, max_tokens=100)
    assert llm.n_tokens <= 31
    text = llm(TEXT, stop=["kite"], **CHAT)["choices"][0]["text"]
    assert "kite" not in text


def test_logprobs() -> None:
    with open_llama(logits_all=True) as llm:
        out = llm(TEXT, logprobs=3, **CHAT)["choices"][0]["logprobs"]
        assert len(out["tokens"]) == len(out["token_logprobs"]) > 0
        assert max(out["token_logprobs"]) <= 0


def test_a_common_prefix_is_reused(llm: Llama) -> None:
    """generate() keeps the common part of two prompts and removes the tail: the answer stays the same."""
    other = [*RECALL.messages[:2], {"role": "user", "content": "What is the code of the mill?"}]
    llm.create_chat_completion(RECALL.messages, **CHAT)
    llm.create_chat_completion(other, **CHAT)
    again = llm.create_chat_completion(RECALL.messages, **CHAT)
    assert again["choices"][0]["message"]["content"] == RECALL.fact.answer


def test_save_and_load_state(llm: Llama) -> None:
    llm.reset()
    llm.eval(llm.tokenize(RECALL.prompt.encode(), special=True))
    state, before = llm.save_state(), llm.kv.stats()
    hot = llm.kv.layer(2).hot()

    def go_on(llama: Llama) -> str:
        tokens = []
        for token in llama.generate(llama.input_ids[: llama.n_tokens].tolist(), temp=0.0):
            if token == llama.token_eos() or len(tokens) == 40:
                break
            tokens.append(token)
        return llama.detokenize(tokens).decode()

    assert go_on(llm) == RECALL.fact.answer
    llm.load_state(state)
    assert llm.kv.stats() == before
    assert go_on(llm) == RECALL.fact.answer
    with open_llama() as other:
        other.load_state(state)
        assert np.array_equal(other.kv.layer(2).hot(), hot)
        assert go_on(other) == RECALL.fact.answer


def test_ram_cache() -> None:
    with open_llama() as llm:
        llm.set_cache(llama_cpp.LlamaRAMCache())
        answers = [
            llm.create_chat_completion(messages, **CHAT)["choices"][0]["message"]["content"]
            for messages in (RECALL.messages, make_recall(52_002, 5).messages, RECALL.messages)
        ]
        assert answers[0] == answers[2] == RECALL.fact.answer


def test_embeddings() -> None:
    """Close to those of an F16 cache, and of several texts at once."""
    texts = ["Mira's kite is teal.", "The code of the mill is 4817."]

    def embed(kv: str) -> np.ndarray:
        with open_llama(kv, embedding=True, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN) as llm:
            return np.array([item["embedding"] for item in llm.create_embedding(texts)["data"]])

    mixed, f16 = embed("mixed"), embed("f16")
    assert mixed.shape == (2, 256)
    cosine = (mixed * f16).sum(axis=1) / np.linalg.norm(mixed, axis=1) / np.linalg.norm(f16, axis=1)
    assert cosine.min() > 0.99


def test_pickle() -> None:
    config = MixedKVConfig(cold_type_k="q8_0", quantization_threshold=64, group_size=32, sink_tokens=2)
    with open_llama(config, n_seq_max=2, kv_unified=True) as llm:
        copy = pickle.loads(pickle.dumps(llm))
    with copy:
        assert copy.kv.config == config
        assert (copy.context_params.n_seq_max, copy.context_params.kv_unified) == (2, True)
        assert copy.create_chat_completion(RECALL.messages, **CHAT)["choices"][0]["message"]["content"]


def test_layers_that_the_model_lacks_are_named() -> None:
    for layers in ("6:q8_0", "0-6:q8_0", "9-:q8_0"):
        with pytest.raises(ValueError, match=f"layers={layers}: the model has 6 layers, 0 to 5"):
            open_llama(f"mixed:layers={layers}")


def test_stats_name_the_types_of_each_layer() -> None:
    with open_llama("mixed:layers=0-1:q8_0/q5_0,5-:q8_0") as llm:
        layers = llm.kv.stats(by_layer=True).layers
        assert "layer 0   2 heads of 64    q8_0/q5_0" in str(llm.kv.stats(by_layer=True))
    assert layers is not None
    others = ("q4_0", "q4_0")
    types = [("q8_0", "q5_0")] * 2 + [others] * 3 + [("q8_0", "q8_0")]
    assert [(layer.type_k, layer.type_v) for layer in layers] == types


@pytest.mark.parametrize("kv", ["f16", "q8_0/q4_0", "mixed", "mixed:layers=2-:q8_0/q4_0"])
def test_pickle_of_any_cache(kv: str) -> None:
    with open_llama(kv) as llm, pickle.loads(pickle.dumps(llm)) as copy:
        assert copy.kv.stats() == llm.kv.stats()


def test_close_and_context_manager() -> None:
    with open_llama() as llm:
        assert llm._ctx.ctx is not None
    assert llm._ctx.ctx is None
    assert llm._model.model is None
    llm.close()


def test_two_caches_in_one_process(llm: Llama) -> None:
    with open_llama("f16") as f16, open_llama("q8_0") as q8_0:
        for other in (f16, llm, q8_0, llm):
            answer = other.create_chat_completion(RECALL.messages, **CHAT)
            assert answer["choices"][0]["message"]["content"] == RECALL.fact.answer
        assert [x.kv.stats().kv for x in (f16, q8_0, llm)] == ["f16", "q8_0", "mixed"]


def test_caches_made_on_several_threads_at_once() -> None:
    specs = ["f16", "mixed", "q8_0", "mixed:threshold=128", "mixed:cold=q8_0", "q4_0"] * 2
    found: dict[int, str] = {}

    def make(i: int) -> None:
        with open_llama(specs[i], n_ctx=256) as llm:
            found[i] = llm.kv.stats().kv

    threads = [threading.Thread(target=make, args=(i,)) for i in range(len(specs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.get(i) for i in range(len(specs))] == specs


def test_a_plain_llama_is_not_affected() -> None:
    with open_llama("mixed"), open_llama("f16") as f16:
        plain = llama_cpp.Llama(str(model_path()), n_ctx=1024, verbose=False)
        texts = [llama(RECALL.text, **CHAT)["choices"][0]["text"] for llama in (plain, f16)]
        sizes = [llama_cpp.llama_state_get_size(llama.ctx) for llama in (plain, f16)]
    plain.close()
    assert texts[0] == texts[1]
    assert sizes[0] == sizes[1]


def test_types_without_kv_choose_a_uniform_cache() -> None:
    with open_llama(None, type_k=8, type_v=2) as llm:
        assert llm.kv.stats().kv == "q8_0/q4_0"
    with open_llama(None, type_k=8) as llm:
        assert llm.kv.stats().kv == "q8_0/f16"


@pytest.mark.parametrize(
    ("kv", "asked", "got"),
    [
        ("f16", None, False),
        ("f16", True, True),
        ("q8_0/f16", None, False),
        ("q8_0", None, True),
        ("mixed", True, True),
    ],
)
def test_flash_attention_is_on_where_needed(kv: str, asked: bool | None, got: bool) -> None:
    with open_llama(kv, flash_attn=asked) as llm:
        expected = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if got else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        assert llm.context_params.flash_attn_type == expected


def test_number_of_sequences() -> None:
    with open_llama(n_seq_max=4) as divided, open_llama(n_seq_max=4, kv_unified=True) as unified:
        assert (divided.kv.stats().n_ctx, divided.kv.stats().n_seq_max) == (256, 4)
        assert (unified.kv.stats().n_ctx, unified.kv.stats().n_seq_max) == (1024, 4)


def test_lookup_decoding() -> None:
    """Speculation removes wrong guesses from the tail again and again."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    with open_llama(draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4)) as llm:
        answer = llm.create_chat_completion(RECALL.messages, **CHAT)
        assert answer["choices"][0]["message"]["content"] == RECALL.fact.answer


def test_from_pretrained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The class method downloads with huggingface_hub, here a stand-in, and passes on `kv`."""
    (tmp_path / "tiny.gguf").symlink_to(model_path())
    hub, utils = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.utils")
    hub.hf_hub_download = lambda **_: str(tmp_path / "tiny.gguf")  # type: ignore[attr-defined]
    listing: Callable[..., list[str]] = lambda *_args, **_options: ["me/repo/tiny.gguf"]  # noqa: E731
    hub.HfFileSystem = lambda: type("Files", (), {"ls": staticmethod(listing)})  # type: ignore[attr-defined]
    utils.validate_repo_id = lambda _: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    llm = Llama.from_pretrained("me/repo", "*.gguf", kv="mixed:threshold=64", n_ctx=256, verbose=False)
    with llm:  # type: ignore[attr-defined]
        assert isinstance(llm, Llama)
        assert llm.kv.quantization_threshold == 64


def test_a_path_may_be_a_string(llm: Llama) -> None:
    with Llama(str(model_path()), n_ctx=256, verbose=False) as other:
        assert other.model_path == llm.model_path == str(model_path())


def test_a_completion_limits_its_own_tokens_only(llm: Llama) -> None:
    """The limit waited on the `Llama` for the next `generate`, whosever that was."""

    def n_generated() -> int:
        return len(list(islice(llm.generate(prompt, temp=0.0), 30)))

    prompt = llm.tokenize(TEXT.encode())
    llm.create_completion(TEXT, max_tokens=2, stream=True)  # and not read
    assert n_generated() == 30
    with pytest.raises(ValueError, match="exceed context window"):
        llm.create_completion("word " * 3000, max_tokens=2)
    assert n_generated() == 30
    options = {"temperature": 0.0, "logit_bias": {llm.token_eos(): -100.0}, "stream": True}
    long = llm.create_completion(TEXT, max_tokens=30, **options)
    llm.create_completion(TEXT, max_tokens=2, **options)
    assert len(list(long)) > 20
    seen: list[int] = []
    llm.create_completion(TEXT, max_tokens=8, stopping_criteria=lambda ids, _: bool(seen.append(len(ids))))
    assert seen  # the caller's criterion is asked too
