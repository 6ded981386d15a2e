"""What the documentation site has beside the pages in docs/: those that live elsewhere, and those generated.

MkDocs calls the functions below. No text is kept twice: the front page is the README, the page of
comparisons is put together from the places where they were measured, and settings and commands come from
the code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # MkDocs loads this file by its path
from docs.reference import commands_page, settings_page  # noqa: E402

HOMES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
ICON = "src/esper/watch/page/icon.svg"
COMPARES = """# How it compares

What other libraries do, and what they and Esper took for the same work on the same machine. Nothing here is
copied from a paper.

## What grows, and who decides

{table}

## The learner's hot paths beside theirs

{peers}
"""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that live outside docs/."""
    from mkdocs.structure.files import File

    for page, source in HOMES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for page, write in GENERATED.items():
        files.append(File.generated(config, page, content=write()))
    files.append(File.generated(config, "icon.svg", content=(ROOT / ICON).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links as the site has them; what is no page of it (code, results) becomes plain words."""
    back = {source: page for page, source in HOMES.items()}

    def mended(match: re.Match[str]) -> str:
        words, target = match.group(1), match.group(2)
        inside = target.removeprefix("../").removeprefix("docs/")
        name, _, anchor = inside.partition("#")
        name = back.get(name, name)
        if (ROOT / "docs" / name).is_file() or name in (*HOMES, *GENERATED, ""):
            return f"[{words}]({name}{'#' + anchor if anchor else ''})"
        return words

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:)([^)\s]+)\)", mended, markdown.replace("](docs/", "]("))


def compares() -> str:
    """The page of comparisons, from the guide to controllers and the benchmark of peers."""
    guide = (ROOT / "docs/controllers.md").read_text(encoding="utf-8")
    table = next(block for block in guide.split("\n\n") if "| gromo |" in block)
    peers = (ROOT / "benchmarks/results/peers-cpu.md").read_text(encoding="utf-8")
    return COMPARES.format(table=table, peers=re.sub(r"^#+ ", "### ", peers, flags=re.MULTILINE))


GENERATED = {"compares.md": compares, "settings.md": settings_page, "commands.md": commands_page}
