"""Results as lines of JSON, each with the machine that it was measured on."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")


def line_of(result: Any, machine: str) -> str:
    return json.dumps({"device": machine, **asdict(result)})


def read_results(parser: argparse.ArgumentParser, path: Path, kind: type[Result]) -> tuple[list[Result], str]:
    """What --json printed, and the machine; a file that holds nothing of the kind ends the command."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        machine = rows[0].get("device", "an unnamed machine")
        return [kind(**{k: v for k, v in row.items() if k != "device"}) for row in rows], machine
    except (OSError, ValueError, TypeError, IndexError, AttributeError):
        parser.error(f"{path} does not hold lines of this benchmark; give a file that --json wrote")
