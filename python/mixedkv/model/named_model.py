"""Find models that go by a name: the bundled one, those in packages, and those of the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from mixedkv.bundled import model_path
from mixedkv.config.checks import did_you_mean
from mixedkv.model.hub_model import PREFIX, hub_model, is_hub_name
from mixedkv.model.packaged_model import PACKAGED

_F16 = ":f16"
NAMES = (*PACKAGED, *(name + _F16 for name in PACKAGED))
_OF_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.gguf)(:[\w.-]+)?", re.ASCII)
HELP = (
    f"GGUF model, OWNER/REPO[:FILE] of the Hugging Face Hub with the extra `hub`, or {', '.join(PACKAGED)}, "
    f"also as smollm2{_F16} (default: the bundled model)"
)


def find_model(given: str | None) -> Path:
    """Return the path of a model that was given by its name or as a file; None is the bundled model.

    A file in the current folder comes before a model of the same name. Models in packages and those of the
    hub are downloaded where they are not on this machine.

    Raises:
        ValueError: it is neither a file nor a name, or see `PackagedModel.quantised` and `hub_model`.
        OSError: a file cannot be written.
    """
    if given is None:
        return model_path()
    if not is_name(given):
        is_file = given and "://" not in given and (given.endswith(".gguf") or Path(given).exists())
        return Path(given) if is_file else refuse_name(given)
    if given not in NAMES:
        return hub_model(given if is_hub_name(given) else PREFIX + given)
    model = PACKAGED[given.removesuffix(_F16)]
    return model.f16() if given.endswith(_F16) else model.quantised()


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
    """Return the names of models that are on this machine, without those of the hub, and their files."""
    kept = [
        pair
        for name, model in PACKAGED.items()
        for pair in ((name, model.kept()), (name + _F16, model.kept_f16()))
    ]
    return [("(bundled)", model_path()), *((name, path) for name, path in kept if path is not None)]
