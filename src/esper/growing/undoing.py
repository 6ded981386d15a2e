"""Changes to models and other objects that are taken back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Undo:
    """What some objects were: their attributes, and what the dictionaries among these held.

    Whether a module learns is no part of it.
    """

    def __init__(self, objects: Iterable[Any]):
        unique = {id(thing): thing for thing in objects}
        self._saved = [(thing, _copied(vars(thing))) for thing in unique.values()]

    def __call__(self) -> None:
        """Make them what they were."""
        for thing, attributes in self._saved:
            own = vars(thing)
            mode = {key: own[key] for key in ("training",) if key in own}
            own.clear()
            own.update(_copied(attributes) | mode)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.copy(value) if isinstance(value, dict) else value for key, value in attributes.items()}


@contextmanager
def undone(objects: Iterable[Any]) -> Iterator[None]:
    """What happens to these objects inside is taken back at the end."""
    undo = Undo(objects)
    try:
        yield
    finally:
        undo()


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Without gradients, and with every module as in use; modes go back to what they were."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
