"""Describes an API of another program that this server has too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from mixedkv_server.api_error import ApiError
from mixedkv_server.fields import Model, Name
from mixedkv_server.models import Described


class RoutedFields(Model):
    """The fields of a body that a router of several models reads; the model's process reads all of them. An
    API whose requests load or unload a model has a subclass.
    """

    model: Name | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds that the model stays in memory after the request; None for the server's default."""
        return None

    def unload_answer(self, path: str, model: Described) -> Response | None:
        """Return the answer to a request that only unloads the model; None for any other request."""
        return None


@dataclass(frozen=True, kw_only=True)
class ForeignAPI:
    """Endpoints that translate requests into ours, and the events of answers into theirs.

    Args:
        generating: endpoints that need a model which generates text.
        others: endpoints of any model.
        errors: what writes an error in the API's own form, by how the paths begin that have it.
        routed: the fields that a router reads, by how the paths begin whose bodies have them.
        about_models: paths that list or describe models, which a router answers itself.
        model_tag: what the API's clients may add to a model's name.
    """

    generating: APIRouter = field(default_factory=APIRouter)
    others: APIRouter = field(default_factory=APIRouter)
    errors: Mapping[str, Callable[[ApiError], dict[str, Any]]] = field(default_factory=dict)
    routed: Mapping[str, type[RoutedFields]] = field(default_factory=dict)
    about_models: tuple[str, ...] = ()
    model_tag: str = ""
