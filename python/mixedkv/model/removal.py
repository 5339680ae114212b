"""Removes models from the caches that they were downloaded to."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from mixedkv.model.named_model import (
    NAMES,
    PREFIX,
    is_hub_name,
    is_of_hub,
    kept_models,
    named_models,
    parts_of,
)
from mixedkv.model.packaged_model import PACKAGED
from mixedkv.nearest_word import did_you_mean


def remove_model(name: str) -> int:
    """Remove a downloaded model, and return the bytes of its files.

    Args:
        name: of a model in a package; or `hf:OWNER/REPO` with all its files, or `hf:OWNER/REPO:FILE`.

    Raises:
        ValueError: it is not on this machine, or it was not downloaded by its name; the message says what to
            do.
        OSError: a file cannot be removed.
    """
    if name in NAMES:
        return _remove_packaged(name)
    if is_hub_name(name) or is_of_hub(name):
        return _remove_of_hub(name if is_hub_name(name) else PREFIX + name)
    if name and Path(name).exists():
        raise ValueError(f"{name} is a file of yours and was not downloaded by its name: remove it yourself")
    raise _absent(name)


def _absent(name: str) -> ValueError:
    known = [each for each, _ in named_models()[1:]] + [each.name for each in kept_models()]
    hint = did_you_mean(name, ["", *known])
    return ValueError(f"the model {name!r} is not on this machine{hint}: mixedkv models lists what is")


def _remove_packaged(name: str) -> int:
    path = dict(named_models()).get(name)
    if path is None:
        raise _absent(name)
    model = PACKAGED[name.partition(":")[0]]
    if not model.is_own(path):
        raise ValueError(f"{path} belongs to an installed package: pip uninstall {model.packages[0]}")
    size = path.stat().st_size
    path.unlink()
    with contextlib.suppress(OSError):  # the F16 file is still in it
        path.parent.rmdir()
    return size


def _remove_of_hub(name: str) -> int:
    repo_id, colon, file = name.removeprefix(PREFIX).partition(":")
    kept = [each.name for each in kept_models() if each.name.startswith(f"{PREFIX}{repo_id}:")]
    if not kept or (colon and name not in kept):
        raise _absent(name)
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir()
    (repo,) = [each for each in cache.repos if each.repo_id == repo_id and each.repo_type == "model"]
    if not file or kept == [name]:  # with its image encoder, and what else came with it
        # of this one alone: a repository that was renamed or copied has the same commits
        commits = [each.commit_hash for each in repo.revisions]
        strategy = replace(cache, repos=frozenset([repo])).delete_revisions(*commits)
        strategy.execute()
        return int(strategy.expected_freed_size)
    return _remove_files(repo, file)


def _remove_files(repo: Any, file: str) -> int:
    """Remove a file of a repository, or all parts of a split one, in all revisions. A link to somewhere else
    is removed, and not what it points to.
    """
    freed: dict[Path, int] = {}
    used: set[Path] = set()
    for revision in repo.revisions:
        named = {
            each.file_path.relative_to(revision.snapshot_path).as_posix(): each for each in revision.files
        }
        gone = set(parts_of(file, list(named)))
        for each, found in named.items():
            if each in gone:
                if found.blob_path.is_relative_to(repo.repo_path):
                    freed[found.blob_path] = found.size_on_disk
                found.file_path.unlink(missing_ok=True)
            else:
                used.add(found.blob_path)
    for blob in freed.keys() - used:
        blob.unlink(missing_ok=True)
    return sum(size for blob, size in freed.items() if blob not in used)
