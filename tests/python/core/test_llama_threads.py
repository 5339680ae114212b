"""Several threads on one `Llama`: none of its doors ends the process, and answers stay what they are."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.engine.engine import Engine
from mixedkv.errors import ClosedError, ContextBusyError
from support.engine.conversations import open_llama
from support.patience import PATIENCE

pytestmark = pytest.mark.full

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "options",
    [
        ("doors", "--kv=mixed", "--rounds=10"),
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in (
                ("doors", "--kv=mixed", "--rounds=40"),
                ("doors", "--kv=f16", "--rounds=40"),
                ("doors", "--kv=mixed", "--streamed", "--rounds=15"),
                ("closing", "--kv=f16"),
                ("closing", "--kv=mixed", "--streamed", "--rounds=4"),
                ("engine", "--kv=f16", "--rounds=5"),
            )
        ),
        ("closing", "--kv=mixed"),
        ("engine", "--kv=mixed"),
    ],
    ids=" ".join,
)
def test_threads_do_not_end_the_process(options: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.children.threads_child", *options],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def text_of(llm: Llama, prompt: str) -> str:
    return str(llm.create_completion(prompt, max_tokens=12, temperature=0.0)["choices"][0]["text"])


PROMPTS = ["The code of the mill", "Once upon a time there was a barn", "In the harbour"]


def test_answers_of_several_threads_are_each_ones_own() -> None:
    with open_llama() as llm:
        alone = [text_of(llm, prompt) for prompt in PROMPTS]
        together: dict[str, set[str]] = {prompt: set() for prompt in PROMPTS}

        def ask(prompt: str) -> None:
            for _ in range(5):
                together[prompt].add(text_of(llm, prompt))

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [together[prompt] for prompt in PROMPTS] == [{text} for text in alone]


def test_a_stream_that_another_answer_replaced_says_so() -> None:
    with open_llama() as llm:
        stream = llm.create_completion(PROMPTS[0], max_tokens=12, temperature=0.0, stream=True)
        next(stream)
        other = text_of(llm, PROMPTS[1])
        with pytest.raises(ContextBusyError, match=r"another answer was begun .* Engine"):
            next(stream)
        tokens = llm.generate(llm.tokenize(PROMPTS[0].encode()), temp=0.0)
        next(tokens)
        llm.reset()
        with pytest.raises(ContextBusyError):
            next(tokens)
        assert text_of(llm, PROMPTS[1]) == other


@pytest.mark.parametrize(
    "take",
    [
        lambda llm: llm.kv.clear(),
        lambda llm: llm.kv.remove(0, 3),
        lambda llm: setattr(llm, "n_tokens", 1),
    ],
    ids=["clear", "remove", "n_tokens"],
)
def test_a_stream_whose_tokens_were_removed_says_so(take: Callable[[Llama], None]) -> None:
    """It would go on from what is left, without its prompt."""
    with open_llama() as llm:
        stream = llm.create_completion(PROMPTS[0], max_tokens=12, temperature=0.0, stream=True)
        next(stream)
        take(llm)
        with pytest.raises(ContextBusyError, match="its tokens were removed"):
            next(stream)


def test_tokens_can_be_sent_to_a_generator() -> None:
    with open_llama(logits_all=True) as llm:
        tokens = llm.generate([5, 6, 7], temp=0.0)
        first = next(tokens)
        tokens.send([9, 10])
        assert llm.input_ids[:6].tolist() == [5, 6, 7, first, 9, 10]


def test_a_token_without_logits_is_not_sampled() -> None:
    with open_llama() as llm:
        tokens = llm.generate([5, 6, 7], temp=0.0)
        next(tokens)
        with pytest.raises(ValueError, match=r"no logits of token 3.*logits_all"):
            tokens.send([9, 10])
    with open_llama() as llm, open_llama() as other:
        llm.eval([5, 6, 7])
        other.load_state(llm.save_state())
        with contextlib.suppress(ValueError):  # logits may be part of a state
            other.sample(temp=0.0)


def test_what_an_engine_uses_evaluates_nothing_else() -> None:
    with open_llama(n_seq_max=4, kv_unified=True) as llm:
        state = llm.save_state()
        with Engine(llm) as engine:
            for door in (
                lambda: llm.eval([1]),
                lambda: text_of(llm, "x"),
                lambda: next(llm.generate([1])),
                lambda: llm.create_chat_completion([{"role": "user", "content": "x"}]),
                lambda: llm.reset(),
                lambda: llm.load_state(state),
                lambda: engine.call(lambda: llm.eval([1])).result(),
            ):
                with pytest.raises(ContextBusyError, match="an Engine uses this Llama"):
                    door()
            assert engine.submit("The mill", max_tokens=4).result().text
            assert llm.tokenize(b"The mill")
        llm.eval([1])


def test_no_thread_loads_a_state_under_an_engine() -> None:
    """Not on the engine's own thread either, so the error does not send anybody there."""
    with open_llama(n_seq_max=4, kv_unified=True) as llm:
        state = llm.save_state()
        with Engine(llm) as engine:
            inside, seen = threading.Event(), threading.Event()

            def use() -> None:
                with llm.busy.acquire():
                    inside.set()
                    seen.wait(20)

            using = engine.call(use)
            assert inside.wait(PATIENCE)
            with pytest.raises(ContextBusyError) as busy:
                llm.load_state(state)
            with pytest.raises(ContextBusyError) as reset:
                llm.reset()
            seen.set()
            using.result()
            with pytest.raises(ContextBusyError) as called:
                engine.call(lambda: llm.load_state(state)).result()
            assert str(busy.value) == str(called.value)
            assert "load_state: an Engine uses this Llama" in str(busy.value)
            assert "reset: an Engine uses this Llama" in str(reset.value)
            assert "Engine.call" not in str(busy.value)
        llm.load_state(state)


def test_closing_the_model_closes_the_engine_first() -> None:
    llm = open_llama(n_seq_max=4, kv_unified=True)
    engine = Engine(llm)
    # without the token that ends an answer
    endless: dict[str, Any] = {"max_tokens": 1_000_000, "overflow": "slide", "logit_bias": ((2, -100.0),)}
    answer = engine.submit("The mill", **endless)
    llm.close()
    with pytest.raises(ClosedError):
        answer.result()
    with pytest.raises(ClosedError):
        engine.submit("The mill")
    llm.close()
