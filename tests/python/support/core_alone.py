"""Hide the other packages and the extras, as if the core were alone: `pytest -p support.core_alone`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from support import REPOSITORY

OTHER_PACKAGES = {path.name for path in (REPOSITORY / "python").glob("mixedkv_*")}
EXTRAS = (
    "anthropic", "fastapi", "google.protobuf", "grpc", "h11", "httpx", "huggingface_hub", "jsonschema",
    "matplotlib", "msgspec", "obstore", "ollama", "openai", "pandas", "PIL", "playwright",
    "prometheus_client", "pydantic_settings", "ray", "redis", "starlette", "uvicorn", "zmq",
)  # fmt: skip
HIDDEN = {*OTHER_PACKAGES, *EXTRAS}


class Hidden(MetaPathFinder):
    """Finds nothing in place of what is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in HIDDEN:
            raise ModuleNotFoundError(f"No module named {fullname!r} (hidden by a test)", name=fullname)
        return None


sys.meta_path.insert(0, Hidden())
