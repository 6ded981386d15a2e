"""The figures and the pictures of the pages are those of the files that they come from."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hot_paths import find_works
from docs import make_pictures
from studies.growth import report, searches
from studies.growth.records import Sample
from tests.operations import count_operations

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
STUDY = (ROOT / "docs/study.md").read_text(encoding="utf-8")
FINDINGS = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
REPRODUCE = (ROOT / "docs/reproduce.md").read_text(encoding="utf-8")
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


def test_every_picture_has_a_line_that_says_how_it_is_made() -> None:
    pictures = {p.name for ext in ("png", "svg") for p in make_pictures.DOCS.glob(f"*.{ext}")}
    assert [name for name in sorted(pictures) if f"`{name}`" not in REPRODUCE] == []


def test_every_picture_is_shown_on_some_page() -> None:
    pages = "".join(
        p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    )
    shown = {Path(target).name for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", pages)}
    assert {p.name for p in make_pictures.DOCS.glob("*.png")} <= shown


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


def test_factors_against_other_programs_are_those_of_the_measured_lines() -> None:
    measured = [line for line in lines("h200-members.jsonl") if line["commit"] == "5cbea0d"]
    compiled = [line["compiled_loop_ms"] / line["population_ms"] for line in measured]
    slowest, *vmap = sorted(line["vmap_ms"] / line["population_ms"] for line in measured)
    told = [row[1] for row in rows(section(PERFORMANCE, "In short"))]
    found = [float(figure) for cell in told[1:4] for figure in re.findall(r"[\d.]+", cell)]
    assert found == pytest.approx([min(compiled), max(compiled), min(vmap), max(vmap), slowest], rel=0.05)
    assert slowest < 1 < vmap[0]


@pytest.mark.parametrize(
    ("work", "peer"),
    [
        ("advantages", "stable-baselines3"),
        ("advantages", "tianshou"),
        ("eight masked heads", "sb3-contrib"),
        ("recurrent PPO update", "sb3-contrib"),
    ],
)
def test_ratios_to_peers_are_the_ends_of_what_was_measured(work: str, peer: str) -> None:
    measured = rows((MEASURED / "peers-cpu.md").read_text())
    ratios = [float(r[-1].rstrip("×")) for r in measured if r[0].startswith(work) and r[2].startswith(peer)]
    said = re.findall(r"([\d.]+) to ([\d.]+) times", section(README, "How it compares"))
    assert any(agrees(low, min(ratios)) and agrees(high, max(ratios)) for low, high in said)


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        ("masks", r"The masks are (\d+) operations"),
        (
            "features",
            r"(\d+) operations and \d+ allocations for any number of members and slots; a",
        ),
        ("kl", r"their KL is (\d+) operations"),
        ("gae", r"\| numba \|.*\| (\d+) \|"),
        ("buffer", r"by the mask\. (\d+) operations for any number of members"),
        ("buffer_ragged", r"any number of members, (\d+) with a mask"),
    ],
)
def test_operation_counts_of_the_findings_are_those_of_today(work: str, sentence: str) -> None:
    told = re.search(sentence, FINDINGS)
    assert told is not None
    case = find_works()[work].prepare(16, 3)
    case.ours()  # the first call makes small tables
    assert int(told[1]) == pytest.approx(count_operations(case.ours), rel=0.1)
