"""A model or adapter of a router."""

from __future__ import annotations

from dataclasses import dataclass, field

from mixedkv.server.described import Described
from mixedkv.server.router.processes import ModelPlace, Processes


@dataclass(kw_only=True)
class RoutedModel(Described):
    """A model or adapter, and the process that serves it.

    Args:
        others: the other models by name; only of the first model.
    """

    processes: Processes
    place: ModelPlace
    others: dict[str, RoutedModel] = field(default_factory=dict)

    @property
    def all(self) -> list[RoutedModel]:
        """All models and adapters of the router."""
        return [self, *self.others.values()]

    @property
    def loaded(self) -> bool:
        return self.place.takes_requests

    @property
    def expires_in(self) -> float:
        return self.place.expires_in


def routed(model: Described) -> RoutedModel:
    """Return a model that was found by name in the state of a router's application."""
    assert isinstance(model, RoutedModel)
    return model
