"""Set the line numbers of links to code: [`file.py:name`](../src/esper/file.py#L1) gets the line of its name.

`python -m docs.line_links`, a part of `make format`, rewrites the pages of docs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parent
LINK = re.compile(r"(\[`[\w/]+\.py:([\w.]+)`\]\(([^)#]+)#L)\d+\)")


def line_of(name: str, file: Path) -> int:
    """Return where a name such as `Class.method` is defined; raises StopIteration where it is not."""
    node: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for part in name.split("."):
        node = next(child for child in ast.iter_child_nodes(node) if part in names_of(child))
    return node.lineno  # type: ignore[attr-defined]


def names_of(node: ast.AST) -> set[str]:
    """Return what a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return {target.id for target in targets if isinstance(target, ast.Name)}


def main() -> None:
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        fresh = LINK.sub(lambda found: f"{found[1]}{line_of(found[2], DOCS / found[3])})", text)
        if fresh != text:
            page.write_text(fresh, encoding="utf-8")
            print(f"wrote {page}")


if __name__ == "__main__":
    main()
