"""The figures and the pictures of the pages are those of the files that they come from."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs import make_pictures
from studies.growth import report, searches
from studies.growth.records import Sample

ROOT = Path(__file__).parent.parent
PERFORMANCE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
STUDY = (ROOT / "docs/study.md").read_text(encoding="utf-8")
MEASURED = ROOT / "benchmarks/results"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (MEASURED / name).read_text().splitlines()]


def agrees(text: str, value: float) -> bool:
    """Whether a figure in the text is a value, rounded to the digits that the text has."""
    digits = len(text.partition(".")[2])
    return abs(float(text.replace(",", "").rstrip("×")) - value) <= 0.5001 * 10**-digits


def section(page: str, heading: str) -> str:
    return re.split(r"^## ", page.split(f"## {heading}\n")[1], flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, without thousands' commas."""
    found = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().replace(",", "") for cell in line.strip("|").split("|")] for line in found]


@pytest.mark.parametrize("name", make_pictures.PICTURES)
def test_pictures_show_the_files_of_today(name: str) -> None:
    """If this fails: python -m docs.make_pictures, and look at what has changed."""
    recorded = make_pictures.recorded_digest(make_pictures.DOCS / name)
    assert recorded == make_pictures.PICTURES[name].digest(), f"python -m docs.make_pictures {name}"


LONG_SEARCH = "ASHA ×8"  # to replay it takes longer than all other searches together


@pytest.fixture(scope="module")
def study() -> report.Study:
    """The committed samples, with the searches that are replayed from them; a quick one for the long one."""
    replayed = searches.asha

    def quick(samples: list[Sample], task: str, budget: float, times: int, quarters: bool = False) -> Sample:
        if f"ASHA ×{times}" != LONG_SEARCH:
            return replayed(samples, task, budget, times, quarters)
        return replace(searches.random_search(samples, task, budget, times), arm=LONG_SEARCH)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searches, "asha", quick)
        return report.Study.of()


def test_the_tables_of_the_study_are_what_its_files_give(study: report.Study) -> None:
    """If this fails: python -m studies.growth report"""
    found, told = (
        [line for line in page.splitlines() if not line.startswith(f"| {LONG_SEARCH} |")]
        for page in (report.page_with_tables(STUDY, study), STUDY)
    )
    assert found == told
    assert len(told) == len(STUDY.splitlines()) - 1
    for name in report.TABLES:
        assert f"<!-- study:{name} -->" in STUDY


@pytest.mark.long
def test_the_tables_of_the_study_are_what_its_files_give_with_every_search() -> None:
    assert report.page_with_tables(STUDY, report.Study.of()) == STUDY


def test_the_table_of_the_population_is_what_was_measured() -> None:
    named = {"training step": "train step", "with seeds and shadows": "train step with seeds"}
    measured = {(r["work"], r["precision"], int(r["n"])): r for r in lines("h200-population.jsonl")}
    told = [row for row in rows(section(PERFORMANCE, "The population on an H200")) if row[0] in named]
    assert len(told) == len(measured)
    for work, precision, members, slow, fast, ratio, speed in told:
        line = measured[named[work], precision, int(members)]
        keys = ("baseline_ms", "ours_ms", "ratio", "member_epochs_per_s")
        for text, key in zip((slow, fast, ratio, speed), keys, strict=True):
            assert agrees(text, line[key]), f"{work}, {precision}, {members}: {key} is {line[key]}"


def test_the_table_of_the_loop_is_what_was_measured() -> None:
    ours, theirs = (
        {(r["work"], int(r["n"])): r for r in lines(name) if r["precision"] == "bfloat16"}
        for name in ("h200-loop-profile.jsonl", "h200-loop.jsonl")
    )
    told = [row for row in rows(section(PERFORMANCE, "The whole loop")) if len(row) > 10 and row[1].isdigit()]
    assert len(told) == len(ours)
    for row in told:
        line, other = ours[row[0], int(row[1])], theirs[row[0], int(row[1])]
        assert agrees(row[2], line["member_steps_per_s"])
        assert agrees(row[3], other["member_steps_per_s"])
        assert agrees(row[4], line["step_ms"])
    after = [f"{round(r['member_steps_per_s']):,}" for r in lines("h200-loop-by-slot.jsonl")]
    assert [speed for speed in after if speed not in PERFORMANCE] == []
