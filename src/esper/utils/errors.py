"""Errors with a sentence for the user, and the place in the user's code that raised one."""

from __future__ import annotations

import sysconfig
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType


class UserError(ValueError):
    """Bad input, in one sentence: what was given, what is allowed, what to do."""


def one_line(error: Exception) -> str:
    """Return the first line of an error message, or the type of the error where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def raised_at(error: BaseException) -> str:
    """Name the innermost line of the user's own code that an error came through, as " at run.py, line 12".

    Code of Esper, of installed packages and of the standard library is passed over; "" where nothing is left.
    """
    ours = str(Path(__file__).parents[1])
    stdlib = sysconfig.get_paths()["stdlib"]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        installed = "site-packages" in frame.filename or "dist-packages" in frame.filename
        if not installed and not frame.filename.startswith((ours, stdlib, "<")):
            return f" at {frame.filename}, line {frame.lineno}"
    return ""


def with_place(error: BaseException) -> str:
    """Describe an error of the user's own code with its file and line: "ValueError: boom at my.py, line 3".

    Without a line of the user's code in its traceback it is what the error says, or its type.
    """
    name, text, place = type(error).__name__, " ".join(str(error).split()), raised_at(error)
    if isinstance(error, SyntaxError) and error.filename:
        text, place = error.msg, f" at {error.filename}, line {error.lineno}"
    if not place:
        return text or name
    return f"{name}: {text}{place}" if text else f"{name}{place}"


class MissingPackageError(UserError, ImportError):
    """A package of an optional extra that is not installed."""


class ReportedElsewhereError(UserError):
    """Bad input that another process reports."""


class LostProcessError(RuntimeError):
    """Another process ended, or did not answer in time."""


def require(module: str, extra: str, what: str) -> ModuleType:
    """Import a module that `what` needs from an optional extra; raise MissingPackageError without it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingPackageError(
            f"{what} needs the package {package}; install its extra: pip install 'esper-lite[{extra}]'"
        ) from error
