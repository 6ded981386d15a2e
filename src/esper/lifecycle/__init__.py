"""The rules of growth: stages, actions, slots, alpha, gates, legality, and one step of them all.

What `api` lists is loaded when it is first asked for, so that a configuration is read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from esper.lifecycle.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        return getattr(import_module("esper.lifecycle.api"), name)
