"""The errors that are addressed to the person at the keyboard."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


class UserError(ValueError):
    """Bad input or a bad place, told in one sentence: what was given, what is allowed, how to mend it."""


def one_line(error: Exception) -> str:
    """The first line of what an error of somebody else's code says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class MissingPackageError(UserError, ImportError):
    """A package of an optional extra that is not installed."""


class ToldElsewhereError(UserError):
    """Bad input that another process tells the person about."""


class LostProcessError(RuntimeError):
    """Another process ended, or was waited for in vain."""


def require(module: str, extra: str, what: str) -> ModuleType:
    """A module that `what` needs and that comes with an optional extra; raises MissingPackageError."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingPackageError(
            f"{what} needs the package {package}; install its extra: pip install 'esper-lite[{extra}]'"
        ) from error
