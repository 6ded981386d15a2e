"""The documentation site: every page, every link, and a reference that lacks nothing."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.main import get_command

import esper
from docs.site_pages import GENERATED, HOMES
from esper import cli
from esper.config import RunConfig
from esper.growing.settings import GrowSettings
from esper.population.config import PopulationConfig

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The HTML of every page, by its name. A broken link or a page that the navigation lacks is an error."""
    config = pytest.importorskip("mkdocs.config", reason="mkdocs is not installed: see the extra docs")
    from mkdocs.commands.build import build

    site = tmp_path_factory.mktemp("site")
    build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True))
    return {page.stem: page.read_text(encoding="utf-8") for page in site.glob("*.html")}


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(pages: dict[str, str]) -> None:
    assert {Path(page).stem for page in (*HOMES, *GENERATED)} < set(pages)
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} < set(pages)
    for name, text in pages.items():
        assert 'src="http' not in text, name
        assert 'rel="stylesheet" href="http' not in text, name
    assert "stable-baselines3" in pages["compares"]


def sources() -> Iterator[str]:
    """The Python that users are shown: the scripts, the notebooks and the blocks of the pages."""
    for script in (ROOT / "examples").glob("*.py"):
        yield script.read_text(encoding="utf-8")
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        yield "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
        yield from (block for block in blocks if "from esper" in block)


def shown_names() -> set[str]:
    """What users are shown to import, but for the helpers of the examples themselves."""
    found = set()
    for source in sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "esper":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


INTERNAL = {"esper.utils.statistics.mean_interval", "esper.tasks.text.encode", "esper.tasks.text.CONTEXT",
            "esper.tasks.text.CHARACTERS"}  # fmt: skip


def test_every_public_name_is_in_the_reference_with_its_types(pages: dict[str, str]) -> None:
    public = {f"esper.{name}" for name in esper._LAZY} | shown_names() - INTERNAL
    same = {"esper.tasks.task.HostSpec": "esper.tasks.HostSpec", "esper.tasks.task.Task": "esper.tasks.Task",
            "esper.growing.result.Grown": "esper.Grown"}  # fmt: skip
    missing = [name for name in public if f'id="{same.get(name, name)}"' not in pages["api"]]
    assert missing == []
    start = pages["api"].index('id="esper.grow"')
    assert "Grown</span>" in pages["api"][start : pages["api"].index('id="esper.estimate"')]


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All settings by their dotted names."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("model", [RunConfig, GrowSettings, PopulationConfig])
def test_every_setting_is_in_the_reference(model: type[BaseModel], pages: dict[str, str]) -> None:
    names = list(setting_names(model))
    assert len(names) >= len(model.model_fields)
    missing = [name for name in names if f'id="{model.__name__}.{name}"' not in pages["settings"]]
    assert missing == []


def test_every_command_and_option_is_in_the_reference(pages: dict[str, str]) -> None:
    for command in cli.app.registered_commands:
        section = pages["commands"].partition(f'id="esper-{command.name}"')[2].partition("<h2")[0]
        assert section, command.name
        known = get_command(cli.app).commands[command.name].params  # type: ignore[attr-defined]
        wanted = [option for parameter in known for option in parameter.opts if option.startswith("-")]
        assert [option for option in wanted if f"<code>{option}</code>" not in section] == []
