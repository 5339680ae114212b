"""Models of the hub, by a server that speaks its protocol and the real huggingface_hub."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mixedkv.bundled import model_path
from mixedkv.model.encoder import encoder_beside
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.named_model import choose, hub_model
from support.models.images import png
from support.models.zoo.projector import write_projector
from support.patience import PATIENCE
from support.servers.local_hub import LocalHub, local_hub
from support.servers.server import running

pytest.importorskip("huggingface_hub", reason="needs the Python package huggingface_hub")

pytestmark = pytest.mark.full

MODEL = model_path().read_bytes()
SMALL = b"GGUF" + bytes(100)
LARGE = b"GGUF" + bytes(30_000_000)  # three times what the library writes at once
FILES = ["a-Q8_0.gguf", "a-Q4_K_M.gguf", "mmproj-a-Q4_K_M.gguf", "README.md"]
SPLIT = ["b/b-Q8_0-00001-of-00002.gguf", "b/b-Q8_0-00002-of-00002.gguf"]


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    repos = {
        "me/tiny": {"tiny.gguf": MODEL, "README.md": b"hello"},
        "me/large": {"large.gguf": LARGE},
        "me/many": dict.fromkeys([*FILES, *SPLIT], SMALL),
    }
    with local_hub(repos) as hub:
        yield hub


def mixedkv(hub: LocalHub, home: Path, *args: str, code: int = 0, offline: bool = False) -> tuple[str, str]:
    environ = {**hub.environ(home), **({"HF_HUB_OFFLINE": "1"} if offline else {})}
    done = subprocess.run(
        [sys.executable, "-m", "mixedkv", *args],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout, done.stderr


def test_a_model_is_pulled_once_and_listed(hub: LocalHub, tmp_path: Path) -> None:
    path = mixedkv(hub, tmp_path, "pull", "me/tiny")[0].strip()
    assert Path(path).read_bytes() == MODEL
    assert mixedkv(hub, tmp_path, "pull", "hf:me/tiny:tiny.gguf")[0].strip() == path
    assert [part for _, part in hub.downloads()] == [""]
    listed = mixedkv(hub, tmp_path, "models")[0].splitlines()
    assert listed[0].split() == ["name", "size", "can", "source", "licence", "file"]
    assert listed[1].split()[0] == "(bundled)"
    (line,) = (line for line in listed if "hf:me/tiny:tiny.gguf" in line)
    assert line.endswith(path)
    assert " chat  Hugging Face " in line
    assert " not said " in line
    assert mixedkv(hub, tmp_path, "pull", "me/tiny", offline=True)[0].strip() == path


def test_an_encoder_comes_with_its_model(tmp_path: Path) -> None:
    width = int(read_model_file(model_path()).get("embedding_length"))
    encoder = write_projector("mlp", width, tmp_path).read_bytes()
    (tmp_path / "a.png").write_bytes(png())
    files = {"m-Q8_0.gguf": MODEL, "mmproj-m-F16.gguf": encoder, "mmproj-m-Q8_0.gguf": SMALL}
    requests = ["run", "-m", "me/seeing", "--image", str(tmp_path / "a.png"), "What?", "-n", "4", "-c", "512"]
    with local_hub({"me/seeing": files}) as hub:
        assert mixedkv(hub, tmp_path, *requests)[0].strip()
        assert len(hub.downloads()) == 2
        path = mixedkv(hub, tmp_path, "pull", "me/seeing", offline=True)[0].strip()
        found = encoder_beside(Path(path))
        assert found is not None
        assert found.name == "mmproj-m-F16.gguf"


@pytest.mark.nightly
def test_every_door_takes_the_name(hub: LocalHub, tmp_path: Path) -> None:
    requests = ["run", "-m", "hf:me/tiny", "-p", "On Monday", "-n", "8", "--temp", "0", "--n-ctx", "256"]
    text, _ = mixedkv(hub, tmp_path, *requests)
    assert (
        text
        == mixedkv(hub, tmp_path, *[each.replace("hf:me/tiny", str(model_path())) for each in requests])[0]
    )
    code = """
from mixedkv import Llama
options = {"n_ctx": 256, "verbose": False}
for llm in Llama("hf:me/tiny", **options), Llama.from_pretrained("me/tiny", "*.gguf", **options):
    print(llm.model_path)
    llm.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=hub.environ(tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    first, second = done.stdout.split() or [done.stderr, ""]
    assert Path(first).samefile(second)
    assert len(hub.downloads()) == 1
    environ = {name: value for name, value in hub.environ(tmp_path).items() if name.startswith("HF_")}
    with running("-m", "hf:me/tiny", "--n-ctx", "256", environ=environ) as server:
        assert server.request("GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
    with running("--n-ctx", "256", environ={**environ, "MIXEDKV_MODEL": "a=hf:me/tiny:tiny.gguf"}) as server:
        assert server.request("GET", "/v1/models")[1]["data"][0]["id"] == "a"


def test_a_download_goes_on_where_it_was_cut_off(hub: LocalHub, tmp_path: Path) -> None:
    hub.cut = 25_000_000
    pull = [sys.executable, "-m", "mixedkv", "pull", "me/large"]
    for _ in range(2):  # whether the library tries again itself, or the user does
        done = subprocess.run(
            pull, env=hub.environ(tmp_path), capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if done.returncode == 0:
            break
    assert Path(done.stdout.strip()).read_bytes() == LARGE
    first, second = (part for _, part in hub.downloads())
    assert first == ""
    assert int(second.removeprefix("bytes=").rstrip("-")) >= 10_000_000


def test_damage_is_found(hub: LocalHub, tmp_path: Path) -> None:
    hub.damage = True
    assert "came damaged" in mixedkv(hub, tmp_path, "pull", "me/tiny", code=2)[1]
    hub.damage = False
    assert Path(mixedkv(hub, tmp_path, "pull", "me/tiny")[0].strip()).read_bytes() == MODEL


def test_all_parts_of_a_split_model_come(hub: LocalHub, tmp_path: Path) -> None:
    path = Path(mixedkv(hub, tmp_path, "pull", "me/many:b-Q8_0-00001-of-00002.gguf")[0].strip())
    assert sorted(each.name for each in path.parent.iterdir()) == [Path(name).name for name in SPLIT]
    assert "b-Q8_0-00001" in mixedkv(hub, tmp_path, "models")[0]


def test_models_are_removed_whole_or_by_file(hub: LocalHub, tmp_path: Path) -> None:
    tiny = Path(mixedkv(hub, tmp_path, "pull", "me/tiny")[0].strip())
    assert mixedkv(hub, tmp_path, "rm", "me/tiny")[0].startswith("me/tiny: removed, 4.8 MiB")
    assert not tiny.exists()
    assert "is not on this machine" in mixedkv(hub, tmp_path, "rm", "me/tiny", code=2)[1]
    small = Path(mixedkv(hub, tmp_path, "pull", "me/many:Q4_K_M")[0].strip())
    split = Path(mixedkv(hub, tmp_path, "pull", "me/many:b-Q8_0-00001-of-00002.gguf")[0].strip())
    said = mixedkv(hub, tmp_path, "rm", f"hf:me/many:{SPLIT[0]}")[0]
    assert said.startswith(f"hf:me/many:{SPLIT[0]}: removed, ")
    assert list(split.parent.glob("*.gguf")) == []  # both parts
    assert small.read_bytes() == SMALL  # whose blob is the same
    assert "me/many:a-Q4_K_M.gguf" in mixedkv(hub, tmp_path, "models")[0]
    assert "me/many" in mixedkv(hub, tmp_path, "rm", "hf:me/many:a-Q4_K_M.gguf")[0]
    assert "me/many" not in mixedkv(hub, tmp_path, "ls")[0]
    assert not small.exists()


def test_rm_removes_nothing_outside_the_cache(hub: LocalHub, tmp_path: Path) -> None:
    home, own = tmp_path / "home", tmp_path / "own.gguf"
    own.write_bytes(MODEL)
    small = Path(mixedkv(hub, home, "pull", "me/many:Q4_K_M")[0].strip())
    linked = small.with_name("a-Q8_0.gguf")  # a file of the user's, put where the hub's would be
    linked.symlink_to(own)
    assert ": removed, 0 B" in mixedkv(hub, home, "rm", "hf:me/many:a-Q8_0.gguf")[0]
    assert not linked.is_symlink()
    linked.symlink_to(own)
    assert mixedkv(hub, home, "rm", "me/many")[0].startswith("me/many: removed, ")
    assert not small.exists()
    assert own.read_bytes() == MODEL


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rm_removes_no_data_set(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Both have one commit, and which of them a search by commits found depended on the hash of strings."""
    monkeypatch.setenv("PYTHONHASHSEED", str(seed))
    model = Path(mixedkv(hub, tmp_path, "pull", "me/tiny")[0].strip())
    folder = model.parents[2]
    data = folder.with_name(folder.name.replace("models--", "datasets--"))
    shutil.copytree(folder, data, symlinks=True)
    assert mixedkv(hub, tmp_path, "rm", "me/tiny")[0].startswith("me/tiny: removed, 4.8 MiB")
    assert "me/tiny" not in mixedkv(hub, tmp_path, "models")[0]  # a data set's file is no model
    assert "is not on this machine" in mixedkv(hub, tmp_path, "rm", "me/tiny", code=2)[1]
    assert (data / model.relative_to(folder)).read_bytes() == MODEL


@pytest.mark.parametrize("name", ["hf:me/tiny:", "hf:me/tiny:../..", "hf:../..", ""])
def test_rm_takes_whole_names_only(hub: LocalHub, tmp_path: Path, name: str) -> None:
    model = Path(mixedkv(hub, tmp_path, "pull", "me/tiny")[0].strip())
    assert f"the model {name!r} is not on this machine" in mixedkv(hub, tmp_path, "rm", name, code=2)[1]
    assert model.exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hf:me", "write hf:OWNER/REPO"),
        ("hf:me/none", "set HF_TOKEN"),
        ("hf:me/many:q5", "name one of its files as hf:me/many:FILE: a-Q4_K_M.gguf, a-Q8_0.gguf"),
        ("hf:me/many:Q8_0", "name one of its files"),
    ],
)
def test_what_cannot_be_had_is_said(hub: LocalHub, tmp_path: Path, name: str, says: str) -> None:
    said = mixedkv(hub, tmp_path, "info", "-m", name, code=2)[1]
    assert says in said
    assert len(said.splitlines()) == 1


def test_what_is_in_the_cache_needs_no_hub(hub: LocalHub, tmp_path: Path) -> None:
    mixedkv(hub, tmp_path, "pull", "me/many:a-Q8_0.gguf")
    hub.requests.clear()
    for name in ("hf:me/many:a-Q8_0.gguf", "hf:me/many:q8_0"):
        assert "error" in mixedkv(hub, tmp_path, "info", "-m", name, code=2)[1]  # it is no model
    assert hub.requests == []


def test_without_a_hub_the_reason_is_said(tmp_path: Path, hub: LocalHub) -> None:
    said = mixedkv(hub, tmp_path, "pull", "me/tiny", code=2, offline=True)[1]
    assert "the hub does not answer" in said
    assert "not in the cache" in said


@pytest.mark.parametrize(
    ("files", "expected", "file"),
    [
        (FILES, "", "a-Q4_K_M.gguf"),
        (FILES, "q8_0", "a-Q8_0.gguf"),
        (FILES, "a-Q8_0.gguf", "a-Q8_0.gguf"),
        (["x.gguf", "mmproj.gguf"], "", "x.gguf"),
        (SPLIT, "Q8_0", SPLIT[0]),
    ],
)
def test_the_file_that_was_meant(files: list[str], expected: str, file: str) -> None:
    assert choose(files, expected, f"hf:me/a:{expected}") == file


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"mixedkv\[hub\]"):
        hub_model("hf:me/a")
