"""How a study ends when its input is bad: one sentence and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

from esper.errors import UserError


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
