"""Fixtures of the Python tests. mixedkv comes first: it chooses the libllama that llama_cpp loads."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import mixedkv  # noqa: F401  (before llama_cpp)
from mixedkv import Llama
from mixedkv.engine import PromptCache
from mixedkv.model.packaged_model import GEMMA3, SMOLLM2
from mixedkv.store import KVStore
from support.cache.harness import N_GPU_LAYERS, Ctx, Mixed, Model, Uniform
from support.cache.hidden import hidden
from support.cache.oracle import Oracle, oracle_of
from support.engine.conversations import empty, open_llama
from support.models import zoo
from support.models.planted import plant
from support.needs import EMULATED, NEEDS, missing, undeclared
from support.tiers import may_have, tier_of

# a shell has its background jobs ignore Ctrl-C, and what they start inherits it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def be_patient() -> None:
    """No example is too slow: a machine may be."""
    import hypothesis

    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("patient")


LIMITS_ON_TIME = (  # seconds that the package allows itself
    "mixedkv.constrain.constraint._SLOWEST_MASK",
    "mixedkv.constrain.trial.SECONDS",
    "mixedkv.constrain.trial.STEP_SECONDS",
    "mixedkv.engine.chat.chat_template._PROBE_SECONDS",
    "mixedkv.engine.chat.text_tokenizer._SECONDS",
    "mixedkv.work.processes.CLOCK_SECONDS",
)


@pytest.fixture(scope="session", autouse=True)
def limits_on_time() -> Iterator[None]:
    """Make them twenty times as long under emulation, where everything takes as much longer."""
    with pytest.MonkeyPatch.context() as patch:
        for name in LIMITS_ON_TIME if EMULATED else ():
            module, _, limit = name.rpartition(".")
            patch.setattr(name, 20 * getattr(import_module(module), limit))
        yield


@pytest.fixture(scope="module", autouse=True)
def windows(request: pytest.FixtureRequest) -> Iterator[None]:
    with hidden(hot_budget="all" if getattr(request.module, "WINDOWS_FOR_ALL", False) else ""):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = ("core", "full", "nightly", "bench")
    parser.addoption("--tier", choices=choices, help="run the tests of one tier")


def needs_of(item: pytest.Item) -> list[str]:
    return [need for mark in item.iter_markers("needs") for need in mark.args]


def tier(item: pytest.Item) -> str:
    """Return the tier of a test.

    Raises:
        pytest.UsageError: no mark says when it runs or what it needs
    """
    marks = [mark.name for node in reversed(item.listchain()) for mark in reversed(node.own_markers)]
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    found = tier_of(marks, parameters, zoo.SHAPES)
    if found is None:
        text = (
            "no mark says when it runs; write `pytestmark = pytest.mark.full` below the imports of its file"
        )
        raise pytest.UsageError(f"{item.nodeid}: {text}, or core, nightly or bench (CONTRIBUTING.md)")
    needs = needs_of(item)
    if unknown := [need for need in needs if need not in NEEDS]:
        raise pytest.UsageError(f"{item.nodeid} needs {unknown[0]!r}: choose from {', '.join(NEEDS)}")
    if forgotten := undeclared(needs, getattr(item, "fixturenames", ())):
        raise pytest.UsageError(f"{item.nodeid} uses it: write @pytest.mark.needs({forgotten[0]!r})")
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := missing(needs_of(item)):
        pytest.skip(reason)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Other files are not imported: the server's clients take seconds, in each process."""
    expected = config.getoption("tier")
    if (
        expected
        and collection_path.match("test_*.py")
        and not may_have(collection_path.read_text(), expected)
    ):
        return True
    return None


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Hypothesis takes half a second to import: only files that use it have it."""
    if re.search("^(from|import) hypothesis", module_path.read_text(), re.MULTILINE):
        be_patient()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers = {item: tier(item) for item in items}  # each, also without the option: it may be undeclared
    if expected := config.getoption("tier"):
        others = [item for item in items if tiers[item] != expected]
        items[:] = [item for item in items if tiers[item] == expected]
        config.hook.pytest_deselected(items=others)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how each test that failed runs alone."""
    failed = (terminalreporter.getreports(kind) for kind in ("failed", "error"))
    for name in dict.fromkeys(report.nodeid for reports in failed for report in reports):
        terminalreporter.write_line(f"alone: pytest {shlex.quote(name)}")


@pytest.fixture(scope="session")
def zoo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the zoo's GGUF files, written on demand."""
    return tmp_path_factory.mktemp("zoo")


@pytest.fixture(scope="session")
def zoo_path(zoo_dir: Path) -> Callable[[str], Path]:
    """Path of a zoo model's file."""
    return lambda name: zoo.write(name, zoo_dir)


@pytest.fixture(scope="session")
def zoo_q4_1_path(zoo_dir: Path) -> Callable[[str], Path]:
    """Path of a zoo model's file with weights in Q4_1."""
    return lambda name: zoo.write_q4_1(name, zoo_dir)


@pytest.fixture(scope="session")
def load(zoo_dir: Path) -> Iterator[Callable[..., Model]]:
    """load(name) or load(name, only=layer): a zoo model, or its muted form; loaded once."""
    models: dict[tuple[str, int], Model] = {}

    def load_(name: str, only: int = -1) -> Model:
        if (name, only) not in models:
            path = zoo.write(name, zoo_dir) if only < 0 else zoo.write_muted(name, only, zoo_dir)
            models[name, only] = Model(path)
        return models[name, only]

    yield load_
    for model in models.values():
        model.close()


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with F16 weights, in a folder without a sidecar."""
    return _real(SMOLLM2.f16, tmp_path_factory)


@pytest.fixture(scope="session")
def real_model_q4_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 in Q4_1, as it was downloaded, in a folder without a sidecar."""
    return _real(SMOLLM2.quantised, tmp_path_factory)


@pytest.fixture(scope="session")
def real_model_planted(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with F16 weights and outliers planted in its keys."""
    return plant(real_model, tmp_path_factory.mktemp("planted") / "SmolLM2-planted.gguf", seed=1)


@pytest.fixture(scope="session")
def real_model_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M with F16 weights, in a folder without a sidecar: sliding windows, one wide KV head."""
    return _real(GEMMA3.f16, tmp_path_factory)


@pytest.fixture(scope="session")
def real_model_gemma_q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M in Q4_K_M, as it was downloaded, in a folder without a sidecar."""
    return _real(GEMMA3.quantised, tmp_path_factory)


@pytest.fixture(scope="session")
def real_model_gemma_planted(real_model_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M with F16 weights and outliers planted in its keys."""
    return plant(real_model_gemma, tmp_path_factory.mktemp("planted") / "gemma-planted.gguf", seed=1)


def _real(find: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        source = find()
    except ValueError as error:
        if "pip cannot download" not in str(error):
            raise
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("real") / source.name
    path.symlink_to(source)
    return path


@pytest.fixture
def open_ctx(load: Callable[..., Model]) -> Iterator[Callable[..., Ctx]]:
    """open_ctx(name, kv, **options): a context that closes with the test; options as harness.Ctx."""
    with ExitStack() as stack:
        yield lambda name, kv, **options: stack.enter_context(Ctx(load(name), kv, **options))


@pytest.fixture
def open_pair(load: Callable[..., Model]) -> Iterator[Callable[..., tuple[Ctx, Oracle]]]:
    """open_pair(name, layer, kv, **options): a context of the muted model and the oracle that does the
    same.
    """
    with ExitStack() as stack:

        def open_(name: str, il: int, kv: Uniform | Mixed, **options: object) -> tuple[Ctx, Oracle]:
            ctx = stack.enter_context(Ctx(load(name, only=il), kv, **options))  # type: ignore[arg-type]
            shared = {key: options[key] for key in ("n_seq_max", "unified") if key in options}
            mine = kv.of_layer(il) if isinstance(kv, Mixed) else kv
            oracle = oracle_of(zoo.muted(name, il), il, mine, **shared)  # type: ignore[arg-type]
            oracle.take_scales(ctx)
            return ctx, oracle

        yield open_


@pytest.fixture(scope="session")
def has_fused(load: Callable[..., Model]) -> bool:
    if N_GPU_LAYERS:  # a device that reads both tiers in place takes attention="fused" too
        with Ctx(load("llama-64"), Mixed()) as ctx:
            return all(layer["in_place"] for layer in ctx.layers())
    with Ctx(load("llama-64"), Mixed(attention="fused")) as ctx:
        return all(layer["fused"] for layer in ctx.layers())


@pytest.fixture(params=["merged", "fused"])
def attention(request: pytest.FixtureRequest, has_fused: bool) -> str:
    """Both attention paths."""
    if request.param == "fused" and not has_fused:
        pytest.skip("no fused kernel in this build")
    return request.param


@pytest.fixture(scope="module")
def shared() -> Iterator[Llama]:
    """The bundled model, loaded once for the conversations of a file."""
    with open_llama() as llm:
        yield llm


@pytest.fixture
def llm(shared: Llama) -> Llama:
    """As in a new process: nothing is live."""
    empty(shared)
    return shared


@pytest.fixture
def store() -> Iterator[KVStore]:
    with KVStore(None) as store:
        yield store


@pytest.fixture
def cache(llm: Llama, store: KVStore) -> Iterator[PromptCache]:
    with PromptCache(llm, store) as cache:
        yield cache
