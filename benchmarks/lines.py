"""Results as lines of JSON, each with the machine that it was measured on."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")


def line_of(result: Any, machine: str) -> str:
    """What was measured as a line of JSON, null for what was not."""
    fields = {name: None if value != value else value for name, value in asdict(result).items()}
    return json.dumps({"device": machine, **fields}, allow_nan=False)


def read_results(parser: argparse.ArgumentParser, path: Path, kind: type[Result]) -> tuple[list[Result], str]:
    """What --json printed, and the machine; a file that holds nothing of the kind ends the command."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        machine = rows[0].get("device", "an unnamed machine")
        fields = [{k: math.nan if v is None else v for k, v in row.items() if k != "device"} for row in rows]
        return [kind(**row) for row in fields], machine
    except (OSError, ValueError, TypeError, IndexError, AttributeError):
        parser.error(f"{path} does not hold lines of this benchmark; give a file that --json wrote")
