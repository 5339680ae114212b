"""Many replicas on Ray Serve: `serve run mixedkv_ray:app`. docs/many-machines.md says how.

prefix       what of a request decides where its KV lies
placing      which replica that is: the most of its prompt there, the least work before it
router       this, as Ray Serve calls it
replica      an engine with its whole HTTP API, behind a handle
application  ingress and replicas together
"""

from __future__ import annotations

from typing import Any

__all__ = ["app", "build"]


def __getattr__(name: str) -> Any:
    """Load the application on first use. `build` makes one of options; `app` is that of the environment's
    MIXEDKV_... variables.

    Raises:
        ImportError: Ray Serve is not installed.
        ValueError: an option has a bad value.
    """
    if name not in ("app", "build"):
        raise AttributeError(f"module 'mixedkv_ray' has no attribute {name!r}")
    try:
        from mixedkv_ray import application
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ray"):
            raise
        raise ImportError(f"mixedkv_ray needs {error.name}: pip install 'mixedkv[ray]'") from None
    return application.build if name == "build" else application.build(application.from_environ())
