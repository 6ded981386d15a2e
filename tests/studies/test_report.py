"""The report is made from the files alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from esper.foundation.errors import UserError
from studies import report


def test_a_table_goes_between_its_markers() -> None:
    page = "# Page\n\n<!-- study:main -->\nold\n<!-- end:main -->\n\nlast words\n"
    new = report.placed(page, "main", "Heading", "| new |")
    assert new == "# Page\n\n<!-- study:main -->\n| new |\n<!-- end:main -->\n\nlast words\n"
    assert report.placed(new, "main", "Heading", "| new |") == new


def test_a_new_table_comes_last_with_its_markers() -> None:
    once = report.placed("# Page\n", "time", "Time", "| t |")
    assert once.endswith("### Time\n\n<!-- study:time -->\n| t |\n<!-- end:time -->\n")
    assert report.placed(once, "time", "Time", "| t |") == once


def test_tables_and_pictures_are_written(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["report", "--results", str(results), "--docs", str(tmp_path)])
    report.main()
    assert "<!-- study:summary -->" in (tmp_path / report.STORY).read_text()
    page = (tmp_path / report.PAGE).read_text()
    for name in report.TABLES:
        assert f"<!-- study:{name} -->\n|" in page
    assert "| spirals | static-final of tamiyo, equal FLOPs |" in page
    assert "spirals, scheduled, no ramp" in page
    assert {path.name for path in tmp_path.glob("*.png")} == set(report.PICTURES)


def test_a_file_of_another_form_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "evaluation-digits.json").write_text("[]")
    with pytest.raises(UserError, match="evaluate the task again"):
        report.evaluations(tmp_path)
    with pytest.raises(UserError, match="holds no evaluation"):
        report.evaluations(tmp_path / "none")
