"""Esper: networks that grow while they train.

`esper.grow(model, train=..., val=...)` grows a network of your own. Everything is imported when it is first
asked for, so that `import esper` alone costs nothing. `import esper.gym` makes "esper/Growth-v0" known to
Gymnasium; it happens by itself where Gymnasium was imported first.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.growing.api import grow as grow
    from esper.growing.estimate import estimate as estimate
    from esper.growing.progressive import Progressive as Progressive
    from esper.growing.progressive_lightning import LightningProgressive as LightningProgressive
    from esper.growing.progressive_transformers import TransformersProgressive as TransformersProgressive
    from esper.growing.result import Grown as Grown
    from esper.utils.errors import UserError as UserError

__version__ = "0.5.5"

_LAZY = {
    "grow": "esper.growing.api",
    "estimate": "esper.growing.estimate",
    "Grown": "esper.growing.result",
    "Progressive": "esper.growing.progressive",
    "LightningProgressive": "esper.growing.progressive_lightning",
    "TransformersProgressive": "esper.growing.progressive_transformers",
    "UserError": "esper.utils.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'esper' has no attribute {name!r}; it has {', '.join(sorted(_LAZY))}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


if "gymnasium" in sys.modules:  # whoever already uses Gymnasium finds the environment there
    import_module("esper.gym")
