"""How a study ends when its input is bad, here as in `esper`: one sentence and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
