"""`MixedKVConfig`, `UniformKV` and their specs: what is taken, and what each refusal says."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixedkv import MixedKVConfig, UniformKV, _core
from mixedkv.config import KVSetting, parse_kv
from mixedkv.config.mixed import COLD_TYPES, UNIFORM_TYPES, ggml_type, type_bits, type_name
from mixedkv.model.resolve_budget import join_layers

pytestmark = pytest.mark.core


def any_case(names: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.sampled_from(names).flatmap(lambda name: st.sampled_from((name, name.upper(), name.title())))


@st.composite
def layers(draw: st.DrawFn) -> str:
    """Ranges that do not overlap, in any order; the last may be open."""
    edges = sorted(draw(st.sets(st.integers(0, 99), max_size=6)))
    ranges = [(a, b - 1) for a, b in itertools.pairwise(edges)]
    types = st.lists(any_case(COLD_TYPES), min_size=1, max_size=2).map("/".join)
    items = [f"{a}{'' if a == b else f'-{b}'}:{draw(types)}" for a, b in ranges]
    if edges and draw(st.booleans()):
        items.append(f"{edges[-1]}-:{draw(types)}")
    return ",".join(draw(st.permutations(items)))


@st.composite
def mixed_configs(draw: st.DrawFn) -> MixedKVConfig:
    attention = draw(st.sampled_from(("auto", "fused", "merged")))
    threshold = draw(st.one_of(st.just(0), st.integers(1, 1 << 20)))
    return MixedKVConfig(
        quantization_threshold=threshold,
        group_size=draw(st.integers(1, threshold or 1 << 20)),
        sink_tokens=draw(st.integers(0, 1 << 20)),
        cold_type_k=draw(any_case(COLD_TYPES)),
        cold_type_v=draw(any_case(COLD_TYPES)),
        attention=attention,
        layers=draw(layers()),
        sparse=draw(st.sampled_from(["", "eps:0.05", "eps:1e-06/0.3"])) if attention != "merged" else "",
    )


uniform_settings = st.builds(
    UniformKV,
    type_k=any_case(UNIFORM_TYPES),
    type_v=any_case(UNIFORM_TYPES),
    attention=any_case(("auto", "fused")),
)
settings = st.one_of(mixed_configs(), uniform_settings)


def test_defaults() -> None:
    config = MixedKVConfig()
    assert (config.quantization_threshold, config.group_size) == (64, 16)
    assert (config.cold_type_k, config.cold_type_v) == ("q4_0", "q4_0")
    assert config.enable_quantization


@pytest.mark.parametrize(
    ("spec", "setting"),
    [
        ("mixed", MixedKVConfig()),
        (
            "mixed:cold_k=q8_0,cold_v=q4_0,threshold=256,group=32,sinks=4",
            MixedKVConfig(
                cold_type_k="q8_0",
                cold_type_v="q4_0",
                quantization_threshold=256,
                group_size=32,
                sink_tokens=4,
            ),
        ),
        ("mixed:cold=q8_0", MixedKVConfig(cold_type_k="q8_0", cold_type_v="q8_0")),
        ("MIXED: Cold=Q8_0, attention=Merged", parse_kv("mixed:attention=merged,cold=q8_0")),
        ("mixed:threshold=0", MixedKVConfig(quantization_threshold=0)),
        ("mixed:balanced,sinks=8", parse_kv("mixed:sinks=8,cold_k=q8_0,threshold=128,group=32")),
        ("mixed:budget=2GiB", MixedKVConfig(budget=2**31)),
        ("mixed:budget=4.50BIT", MixedKVConfig(budget="4.5bit")),
        (
            "mixed:layers=4-:q4_0, 0-3:Q8_0/q8_0,threshold=64",
            MixedKVConfig(layers="0-3:q8_0,4-:q4_0", quantization_threshold=64),
        ),
        (
            "mixed:quality,layers=1:q4_0/q8_0",
            parse_kv("mixed:layers=1:q4_0/q8_0,cold=q8_0,threshold=256,group=32"),
        ),
        ("f16", UniformKV()),
        ("Q8_0", UniformKV(type_k="q8_0", type_v="q8_0")),
        ("q8_0/q4_0", UniformKV(type_k="q8_0", type_v="q4_0")),
        ("q4_0:attention=fused", UniformKV(type_k="q4_0", type_v="q4_0", attention="fused")),
    ],
)
def test_specs(spec: str, setting: KVSetting) -> None:
    assert parse_kv(spec) == setting


@given(settings)
def test_the_written_form_reads_back(setting: KVSetting) -> None:
    assert parse_kv(str(setting)) == setting
    assert str(parse_kv(str(setting))) == str(setting)


@given(settings)
def test_the_full_form_reads_back_and_leaves_the_window_to_no_default(setting: KVSetting) -> None:
    expected = parse_kv(setting)
    assert parse_kv(setting.full_spec) == expected
    if isinstance(expected, MixedKVConfig):
        keys = {item.partition("=")[0] for item in setting.full_spec.partition(":")[2].split(",")}
        assert keys >= {"cold_k", "cold_v", "threshold", "group", "sinks"}


@given(settings)
def test_settings_stand_for_themselves_and_pickle(setting: KVSetting) -> None:
    assert parse_kv(setting) is setting
    assert pickle.loads(pickle.dumps(setting)) == setting


@given(st.text(max_size=60))
def test_any_text_is_a_setting_or_a_value_error(text: str) -> None:
    try:
        setting = parse_kv(text)
    except ValueError:
        return
    assert isinstance(setting, (MixedKVConfig, UniformKV))


def test_quantization_can_be_turned_off() -> None:
    config = MixedKVConfig(enable_quantization=False, cold_type_k="q8_0")
    assert parse_kv(config) == UniformKV(type_k="f16", type_v="f16")
    assert str(config) == "f16"


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MixedKVConfig().group_size = 8  # type: ignore[misc]
    with pytest.raises(TypeError):
        MixedKVConfig(True)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("quantization_threshold", -1, ValueError),
        ("quantization_threshold", 2**31, ValueError),
        ("quantization_threshold", 32.0, TypeError),
        ("quantization_threshold", True, TypeError),
        ("group_size", 0, ValueError),
        ("group_size", "16", TypeError),
        ("sink_tokens", -1, ValueError),
        ("sink_tokens", None, TypeError),
        ("cold_type_k", "f16", ValueError),
        ("cold_type_v", "q4_k", ValueError),
        ("cold_type_v", 8, TypeError),
        ("attention", "fast", ValueError),
        ("enable_quantization", 1, TypeError),
        ("budget", True, TypeError),
        ("budget", None, TypeError),
        ("layers", None, TypeError),
        ("layers", {0: "q8_0"}, TypeError),
    ],
)
def test_wrong_values_are_named(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=re.escape(f"{field}={value!r}")):
        MixedKVConfig(**{field: value})  # type: ignore[arg-type]


def test_threshold_smaller_than_group() -> None:
    with pytest.raises(ValueError, match=r"quantization_threshold=8 .*group_size=16.*group_size=8 or less"):
        MixedKVConfig(quantization_threshold=8)
    with pytest.raises(ValueError, match=r"threshold=8 .*group=16 \(64 and 16 unless given\)"):
        parse_kv("mixed:threshold=8")
    assert parse_kv("mixed:threshold=8,group=8").group_size == 8  # type: ignore[union-attr]


def test_types_of_a_layer() -> None:
    config = MixedKVConfig(cold_type_k="q8_0", layers="1-2:q4_0/q8_0,5-:q5_0")
    types = [config.types_of(il) for il in range(7)]
    rest, ranged, last = ("q8_0", "q4_0"), ("q4_0", "q8_0"), ("q5_0", "q5_0")
    assert types == [rest, ranged, ranged, rest, rest, last, last]
    assert join_layers((il, *config.types_of(il)) for il in range(7)) == (
        "0:q8_0/q4_0,1-2:q4_0/q8_0,3-4:q8_0/q4_0,5-6:q5_0"
    )
    config.check_layers(6)
    with pytest.raises(ValueError, match=r"layers=.*5-:q5_0: the model has 5 layers, 0 to 4"):
        config.check_layers(5)


def test_threshold_above_the_context() -> None:
    config = MixedKVConfig(quantization_threshold=512, sink_tokens=4)
    config.check_context(516)
    with pytest.raises(ValueError, match=r"quantization_threshold=512 .*n_ctx=515"):
        config.check_context(515)
    MixedKVConfig(quantization_threshold=512, sink_tokens=0).check_context(512)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", r"names no cache: use one of mixed, f16"),
        ("mixd", r"'mixd' names no cache \(did you mean mixed\?\): use one of mixed, f16"),
        ("q4_k", r"names no cache \(did you mean q4_0\?\)"),
        ("q8_0/q5_9", r"names no cache"),
        ("q8_0/", r"names no cache"),
        ("mixed:", r"'' is neither a preset"),
        ("mixed:threshold", r"'threshold' is neither a preset \(compact, .*\) nor key=value"),
        ("mixed:balance", r"did you mean balanced\?"),
        (
            "mixed:treshold=3",
            r"unknown key 'treshold' \(did you mean threshold\?\); known keys: cold, cold_k",
        ),
        ("mixed:threshold=many", r"threshold=many is not a whole number"),
        ("mixed:threshold=-1", r"threshold=-1 is not a whole number"),
        ("mixed:threshold=" + "9" * 5000, r"is not a whole number"),
        ("f16:sinks=4", r"a uniform cache takes attention only, not sinks"),
        ("mixed:cold=q9_9", r"cold='q9_9' is not one of q8_0"),
        ("mixed:cold_v=q9_9", r"cold_v='q9_9' is not one of q8_0"),
        ("mixed:cold=q8_0,cold_k=q4_0", r"gives cold_k twice"),
        ("mixed:cold_k=q8_0,cold=q4_0", r"cold stands for both"),
        ("mixed:group=4,group=8", r"gives group twice"),
        ("f16:threshold=8", r"a uniform cache takes attention only, not threshold"),
        ("mixed:layers=0-3:q8_0,2-:q4_0", r"layers 0-3 and 2- overlap: name each layer once"),
        ("mixed:layers=5:q8_0,5:q8_0", r"layers 5 and 5 overlap"),
        ("mixed:layers=3-1:q8_0", r"layers: '3-1:q8_0' ends before it begins"),
        ("mixed:layers=0-3:q8_0/f16", r"layers: 'f16' in '0-3:q8_0/f16' is not one of q8_0"),
        ("mixed:layers=0-3", r"layers: '0-3' is not a range with types: use e.g. 0-3:q8_0/q4_0"),
        ("mixed:layers=-3:q8_0", r"'-3:q8_0' is not a range"),
        ("mixed:0-3:q8_0", r"'0-3:q8_0' is neither a preset .* nor key=value"),
        ("f16:attention=merged", r"attention='merged' is not one of auto, fused"),
        ("mixed,threshold=8", r"names no cache \(did you mean mixed:threshold=8\?\)"),
        # as it was typed
        ("Mixed: Budget=3 GX", r"budget='3 GX' is not a size"),
        ("MIXED:Cold=Q3_K", r"cold='Q3_K' is not one of q8_0"),
        ("mixed:threshold=ABC", r"threshold=ABC is not a whole number"),
        ("mixed:layers=0-3:Q8_0/Q9", r"layers: 'Q9' in '0-3:Q8_0/Q9' is not one of"),
        ("mixed:sparse=EPS:2", r"sparse=EPS:2: use eps:E"),
        ("Q9_0", r"kv='Q9_0' names no cache \(did you mean q8_0\?\)"),
        ("mixed:Balance", r"'Balance' is neither a preset .*did you mean balanced"),
        ("mixed:budget=2GiB,cold=q8_0", r"budget=2GiB chooses the cold types"),
    ],
)
def test_specs_that_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_kv(spec)


@pytest.mark.parametrize("kv", [None, 8, ["mixed"], {"threshold": 3}])
def test_other_objects_are_no_setting(kv: object) -> None:
    with pytest.raises(TypeError, match="use a spec such as 'mixed'"):
        parse_kv(kv)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kind", "bits"),
    [
        ("f32", 0, 32),
        ("f16", 1, 16),
        ("q8_0", 8, 8.5),
        ("q4_0", 2, 4.5),
        ("lm4", 38, 4.25),
        ("tc3", 36, 3.25),
    ],
)
def test_types_are_those_of_ggml(name: str, kind: int, bits: float) -> None:
    assert ggml_type(name) == kind
    assert type_name(kind) == name
    assert type_bits(name) == bits


@given(st.integers(-3, 40), st.integers(-3, 40), st.integers(-3, 40))
def test_the_rule_of_the_window(threshold: int, group: int, sinks: int) -> None:
    fits = threshold >= 0 and sinks >= 0 and group >= 1 and (threshold == 0 or threshold >= group)
    window = {"quantization_threshold": threshold, "group_size": group, "sink_tokens": sinks}
    if fits:
        MixedKVConfig(**window)  # type: ignore[arg-type]
    else:
        with pytest.raises(ValueError, match=r"quantization_threshold|group_size|sink_tokens"):
            MixedKVConfig(**window)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mixed:cold_k=lm4,cold_v=lm3", "'lm3' was taken out, use 'tc3'"),
        ("mixed:layers=3-:lm4/q5_1", "'q5_1' was taken out, use 'q5_0'"),
        ("mixed:cold=iq4_nl", "cold='iq4_nl' is not one of .*; 'iq4_nl' was taken out, use 'lm4'"),
        ("mixed:cold_v=q4_1", "'q4_1' was taken out, use 'q5_0'"),
        ("q8_0/lm3", "'lm3' was taken out, use 'tc3'"),
        ("mixed:bits=3.5", "bits was taken out: use budget=3.5bit"),
        ("mixed:draft=4", "draft was taken out: leave it out, a window always has room for 16"),
        ("mixed:balanced,hot_budget=all", "hot_budget was taken out: leave it out"),
        ("mixed:equalize=false", "equalize was taken out: leave it out"),
        ("mixed:rounding=8", "rounding was taken out: leave it out"),
        ("mixed:shrink=true", "shrink was taken out: leave it out, or set a smaller threshold"),
        ("mixed:v_skip=1e-6", "v_skip was taken out: leave it out, or use sparse=eps:0.05"),
    ],
)
def test_what_was_taken_out_names_its_replacement(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_kv(spec)


def test_the_library_has_the_same_defaults_as_an_empty_spec() -> None:
    names = {field.name for field in dataclasses.fields(MixedKVConfig)} - {"enable_quantization"}
    assert names == set(_core.DEFAULTS)
    assert all(getattr(MixedKVConfig(), name) == value for name, value in _core.DEFAULTS.items())


@pytest.mark.parametrize("kind", ["q4_1", "q5_1", "iq4_nl"])
def test_llama_cpps_own_caches_keep_their_types(kind: str) -> None:
    assert parse_kv(kind) == UniformKV(type_k=kind, type_v=kind)
