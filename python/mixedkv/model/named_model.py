"""Find the models that go by a name: the bundled one, SmolLM2, and those of the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from mixedkv.bundled import model_path
from mixedkv.model import smollm2
from mixedkv.model.hub_model import PREFIX, hub_model, is_hub_name

SMOLLM2 = "smollm2"
NAMES = (SMOLLM2, f"{SMOLLM2}:f16")
_OF_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.gguf)(:[\w.-]+)?", re.ASCII)
HELP = (
    f"GGUF model, OWNER/REPO[:FILE] of the Hugging Face Hub with the extra `hub`, {NAMES[0]} or {NAMES[1]} "
    "(default: the bundled model)"
)


def find_model(given: str | None) -> Path:
    """Return the path of a model that was given by its name or as a file; None is the bundled model.

    A file in the current folder comes before a model of the same name. SmolLM2 and models of the hub are
    downloaded where they are not on this machine.

    Raises:
        ValueError: see `smollm2_q4_1` and `hub_model`.
        OSError: a file cannot be written.
    """
    if given is None:
        return model_path()
    if not is_name(given):
        return Path(given)
    if given not in NAMES:
        return hub_model(given if is_hub_name(given) else PREFIX + given)
    return smollm2.smollm2_q4_1() if given == SMOLLM2 else smollm2.smollm2_f16()


def is_name(given: str) -> bool:
    """Return whether a model was given by its name, not as a file."""
    return (given in NAMES and not Path(given).exists()) or is_of_hub(given)


def is_of_hub(given: str) -> bool:
    """Return whether a model of the Hugging Face Hub was given: `hf:...`, or OWNER/REPO that is no file."""
    return (is_hub_name(given) or _OF_HUB.fullmatch(given) is not None) and not Path(given).exists()


def named_models() -> list[tuple[str, Path]]:
    """Return the names of models that are on this machine, without those of the hub, and their files."""
    kept = ((NAMES[0], smollm2.kept_q4_1()), (NAMES[1], smollm2.kept_f16()))
    return [("(bundled)", model_path()), *((name, path) for name, path in kept if path is not None)]
