"""The documentation site: every page, every link, and the API from docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.site_pages import HOMES
from esper.config import RunConfig
from esper.growing.settings import GrowSettings
from esper.population.config import PopulationConfig

ROOT = Path(__file__).parent.parent


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    config = pytest.importorskip("mkdocs.config", reason="mkdocs is not installed: see the extra docs")
    from mkdocs.commands.build import build

    build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    pages = {page.stem: page.read_text(encoding="utf-8") for page in tmp_path.glob("*.html")}
    assert {Path(page).stem for page in HOMES} < set(pages)
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} < set(pages)
    for name, text in pages.items():
        assert 'src="http' not in text, name
        assert 'rel="stylesheet" href="http' not in text, name
    assert "esper.growing.api.grow" in pages["api"]
    for settings in (RunConfig, GrowSettings, PopulationConfig):
        assert f'id="{settings.__module__}.{settings.__name__}"' in pages["api"]
        for name in settings.model_fields:
            assert f'id="{settings.__module__}.{settings.__name__}.{name}"' in pages["api"], name
    assert "stable-baselines3" in pages["compares"]
