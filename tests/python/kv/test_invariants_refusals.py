"""Invariant 8: what cannot have a mixed cache says so when the context is made, and names what is wrong.

The model stays usable: the next context with llama.cpp's own cache decodes as if nothing had happened.
"""

from __future__ import annotations

import numpy as np
import pytest

from support.cache.harness import TYPES, Ctx, InitError, Mixed, Uniform, prompt

pytestmark = [pytest.mark.core, pytest.mark.by_model]

CASES = {"llama-48": ["head", "48", "32"], "mamba": ["mamba"], "bert": ["bert"]}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["auto", "fused", "merged"])
def test_models_that_cannot(load, name: str, how: str) -> None:
    model = load(name)
    kv = Mixed(attention=how)
    with pytest.raises(InitError) as refused:
        Ctx(model, kv)
    for word in CASES[name]:
        assert word in str(refused.value)
    if name == "bert":
        return
    with Ctx(model, Uniform()) as ctx:
        want = ctx.decode(prompt(20))
    with pytest.raises(InitError):
        Ctx(model, kv)
    with Ctx(model, Uniform()) as ctx:
        assert np.array_equal(ctx.decode(prompt(20)), want)


@pytest.mark.parametrize("name", CASES)
def test_check_says_the_same_without_a_context(load, name: str) -> None:
    from mixedkv import _core
    from mixedkv.errors import UnsupportedModelError

    q4 = TYPES["q4_0"]
    with pytest.raises((UnsupportedModelError, ValueError)) as refused:
        _core.check(load(name).address, _core.CacheConfig(threshold=32, group_size=16), q4, q4, 512)
    for word in CASES[name]:
        assert word in str(refused.value)


def test_check_compares_the_window_with_the_context(load) -> None:
    from mixedkv import _core

    q4 = TYPES["q4_0"]
    for threshold, sinks in ((513, 0), (500, 13)):
        config = _core.CacheConfig(threshold=threshold, group_size=16, sink_tokens=sinks)
        with pytest.raises(ValueError, match=r"quantization_threshold.*512"):
            _core.check(load("llama-64").address, config, q4, q4, 512)


def test_check_accepts_what_works(load) -> None:
    from mixedkv import _core

    q4 = TYPES["q4_0"]
    config = _core.CacheConfig(threshold=32, group_size=16, sink_tokens=4)
    _core.check(load("llama-64").address, config, q4, q4, 512)


SETTINGS = {
    "flash attention off": (Mixed(flash=False), ["flash"]),
    "group 0": (Mixed(group=0), ["group_size"]),
    "group above the threshold": (Mixed(threshold=16, group=17), ["group_size", "quantization_threshold"]),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_cannot(load, setting: str) -> None:
    kv, words = SETTINGS[setting]
    model = load("llama-64")
    with pytest.raises((InitError, ValueError)) as refused:
        Ctx(model, kv, n_ctx=512)
    for word in words:
        assert word in str(refused.value)
    with Ctx(model, Uniform()) as ctx:
        assert not ctx.stats()["mixed"]
        assert np.isfinite(ctx.decode(prompt(20))).all()
    with Ctx(model, Mixed()) as ctx:
        assert ctx.stats()["mixed"]


def test_a_refused_configuration_does_not_wait_for_the_next_context(load) -> None:
    """The configuration is taken by one llama_init_from_model(), whether it succeeds or not."""
    with pytest.raises(InitError):
        Ctx(load("mamba"), Mixed())
    with Ctx(load("llama-64"), Uniform(k="q4_0", v="q4_0")) as ctx:
        assert not ctx.stats()["mixed"]


def test_withdrawn(load) -> None:
    from mixedkv import _core

    _core.configure_next(_core.CacheConfig(threshold=32, group_size=16))
    _core.withdraw()
    with Ctx(load("llama-64"), Uniform(k="q4_0", v="q4_0")) as ctx:
        assert not ctx.stats()["mixed"]


def test_the_configuration_belongs_to_its_thread(load) -> None:
    from threading import Thread

    from mixedkv import _core

    model, seen = load("llama-64"), []

    def other() -> None:
        with Ctx(model, Uniform(k="q4_0", v="q4_0")) as ctx:
            seen.append(ctx.stats()["mixed"])

    _core.configure_next(_core.CacheConfig(threshold=32, group_size=16))
    thread = Thread(target=other)
    thread.start()
    thread.join()
    _core.withdraw()
    assert seen == [False]


def test_wrong_questions_have_clear_answers(load) -> None:
    from mixedkv import _core

    with Ctx(load("gemma2"), Mixed()) as ctx:
        ctx.decode(prompt(20))
        for il, seq, which in [(99, 0, "k"), (-1, 0, "k"), (1, 5, "k"), (1, -1, "v"), (1, 0, "x")]:
            with pytest.raises((LookupError, ValueError)):
                _core.read_rows(ctx.address, il, seq, which, 0, -1, False)
    with Ctx(load("llama-64"), Uniform()) as ctx, pytest.raises((LookupError, ValueError)):
        ctx.set_window(16, 8, 0)
