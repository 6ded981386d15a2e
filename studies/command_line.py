"""Options of studies and benchmarks; bad ones end them as in `esper`, with one sentence and exit code 2."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable

from esper.utils.devices import own_device
from esper.utils.errors import UserError
from esper.utils.launch import Launch


def run(main: Callable[[], None]) -> None:
    """Run a program; of several processes one that fails says in one line which it is."""
    try:
        main()
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if Launch.of().size == 1:
            raise
        sys.exit(f"{Launch.of()}: {type(error).__name__}: {' '.join(str(error).split())}")


def positive(text: str) -> int:
    """An option that is a number of things."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}; allowed is a whole number at least 1")
    return int(text)


def existing_device(text: str) -> str:
    """An option that names a device of this machine: of several processes each has one of its own."""
    try:
        return str(own_device(text))
    except UserError as error:
        raise ArgumentTypeError(str(error)) from None
