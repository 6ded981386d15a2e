"""docs/architecture.md names every room and every file, and points at things that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/esper"
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
ON_TOP = "On top"
NOT_NAMED = {"__init__", "__main__"}


def rooms() -> dict[str, str]:
    """The text about each room, by the name of its folder; what lies beside the folders is under "On top"."""
    parts = PAGE.split("## Rooms")[1].split("\n## ")[0].split("\n### ")[1:]
    return {ON_TOP if p.startswith(ON_TOP) else re.split(r"\W", p.lstrip("`"))[0]: p for p in parts}


def modules() -> list[Path]:
    return [p.relative_to(SOURCE) for p in sorted(SOURCE.rglob("*.py")) if p.stem not in NOT_NAMED]


def test_every_folder_with_code_has_a_room() -> None:
    folders = {path.parts[0] for path in modules() if len(path.parts) > 1}
    assert sorted(folders - set(rooms())) == [], "add a section to docs/architecture.md"


def test_every_module_is_named_in_its_room() -> None:
    missing = []
    for path in modules():
        room = path.parts[0] if len(path.parts) > 1 else ON_TOP
        text = rooms().get(room, "") + (rooms()["commands"] if path.name == "cli.py" else "")
        if f"`{path.name}`" not in text:
            missing.append(str(path))
    assert missing == [], "add them to their room in docs/architecture.md"


@pytest.mark.parametrize("room", rooms())
def test_no_room_names_a_file_that_is_gone(room: str) -> None:
    folder = SOURCE if room == ON_TOP else SOURCE / room
    there = {path.name for path in folder.rglob("*.py")} | {"cli.py"}
    assert [name for name in re.findall(r"`([a-z_0-9]+\.py)`", rooms()[room]) if name not in there] == []


def defined(path: Path) -> dict[str, set[str]]:
    """The names at the top of a file, each with the names inside it."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = set()
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {t.id: set() for t in targets if isinstance(t, ast.Name)}
    return found


@pytest.mark.parametrize("pointer", sorted(set(re.findall(r"`([\w/]+\.py:[\w.]+)`", PAGE))))
def test_pointers_lead_to_code(pointer: str) -> None:
    file, _, name = pointer.partition(":")
    outer, _, inner = name.partition(".")
    names = defined(SOURCE / file)
    assert outer in names
    assert not inner or inner in names[outer]


def test_the_six_things_are_pointed_at() -> None:
    table = PAGE.split("## Six things")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and ".py:" in line]
    assert len(rows) == 6


def test_a_class_name_has_one_meaning() -> None:
    names = re.findall(
        r"^class (\w+)", "\n".join((SOURCE / path).read_text(encoding="utf-8") for path in modules()), re.M
    )
    assert sorted({name for name in names if names.count(name) > 1}) == [], "rename the less public one"
