"""Functions of the user, which settings name."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from esper.utils.errors import UserError, with_place


def call_function(what: str, name: str, *args: Any) -> Any:
    """Import MODULE:FUNCTION or FILE.py:FUNCTION of the user, call it and return what it returns.

    Raises a UserError that says which `what` has that name, and why it could not be called.
    """
    module, _, function = name.rpartition(":")
    path = Path(os.path.relpath(module or "."))
    # What lies in the current folder or below it is imported from there, as by `python -m`.
    folder = path.parent.resolve() if ".." in path.parts else Path.cwd()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    parts = Path(str(path).removesuffix(".py")).parts
    try:
        if not module or not function:
            raise UserError("that names no function")
        if path.suffix == ".py" and not path.is_file():
            raise UserError(f"the file {module} does not exist")
        imported = import_module(".".join(parts[-1:] if ".." in parts else parts))
        if not hasattr(imported, function):
            raise UserError(f"{module} has no function {function}")
        return getattr(imported, function)(*args)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        why = str(error) if isinstance(error, UserError) else f"it could not be called: {with_place(error)}"
        raise UserError(
            f"{what} is {name!r}, and {why}; give FILE.py:FUNCTION or MODULE:FUNCTION, a function that "
            f"takes {'a seed' if args else 'no arguments'}"
        ) from error
