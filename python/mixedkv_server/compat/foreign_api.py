"""Describes an API of another program that this server has too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter

from mixedkv_server.api_error import ApiError


@dataclass(frozen=True, kw_only=True)
class ForeignAPI:
    """Endpoints that translate requests into ours, and the events of answers into theirs.

    Args:
        generating: endpoints that need a model which generates text.
        others: endpoints of any model.
        errors: what writes an error in the API's own form, by how the paths begin that have it.
    """

    generating: APIRouter = field(default_factory=APIRouter)
    others: APIRouter = field(default_factory=APIRouter)
    errors: Mapping[str, Callable[[ApiError], dict[str, Any]]] = field(default_factory=dict)
