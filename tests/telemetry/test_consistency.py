"""What does not fit together in a run folder is said, and a whole one is silent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from esper import cli
from esper.telemetry.consistency import complaints
from esper.telemetry.run_folder import RunFolder
from tests.telemetry.made_up_run import made_up_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return made_up_run(tmp_path / "run", rounds=6)


def lines(folder: RunFolder) -> list[str]:
    return folder.metrics_file.path.read_text().splitlines(keepends=True)


def put(folder: RunFolder, changed: list[str]) -> None:
    folder.metrics_file.path.write_text("".join(changed))


def test_a_whole_run_has_nothing_to_complain_of(folder: RunFolder) -> None:
    assert complaints(folder) == []


def test_missing_doubled_and_disordered_rounds_are_said(folder: RunFolder) -> None:
    whole = lines(folder)
    put(folder, [*whole[:2], *whole[3:]])
    assert complaints(folder) == ["metrics.jsonl has no line for round 3"]
    put(folder, [*whole[:3], whole[2], *whole[3:]])
    assert complaints(folder) == ["metrics.jsonl has more than one line for round 3"]
    put(folder, [whole[1], whole[0], *whole[2:]])
    assert complaints(folder) == ["the rounds in metrics.jsonl are not in order"]


def test_numbers_that_are_not_finite_are_said(folder: RunFolder) -> None:
    whole = lines(folder)
    record = json.loads(whole[1])
    put(folder, [whole[0], json.dumps({**record, "kl": float("nan")}) + "\n", *whole[2:]])
    assert complaints(folder) == ["kl of round 2 in metrics.jsonl is not a finite number"]
    shares = {**record["op_shares"], "WAIT": float("inf")}
    put(folder, [whole[0], json.dumps({**record, "op_shares": shares}) + "\n", *whole[2:]])
    assert complaints(folder) == ["op_shares.WAIT of round 2 in metrics.jsonl is not a finite number"]
    put(folder, [whole[0], json.dumps({**record, "return_mean": None}) + "\n", *whole[2:]])
    assert [told.split(":")[0] for told in complaints(folder)] == [
        "return_mean of round 2 in metrics.jsonl is unknown"
    ]


def test_results_that_contradict_themselves_are_said(folder: RunFolder) -> None:
    results = folder.results()
    assert results is not None
    better = replace(results.differences[0], mean=0.5)
    folder.write(replace(results, differences=[better, *results.differences[1:]]))
    assert len(complaints(folder)) == 1
    assert "and its members say otherwise" in complaints(folder)[0]
    wrong = replace(results.controllers[0], test_accuracy=[1.5] * 24)
    folder.write(replace(results, controllers=[wrong, *results.controllers[1:]], differences=[]))
    assert complaints(folder) == ["results.json has test accuracies of static outside 0 to 1"]
    others = replace(results.controllers[1], members=list(range(1, 25)))
    folder.write(replace(results, controllers=[results.controllers[0], others]))
    assert "ran different members" in complaints(folder)[0]


@pytest.mark.usefixtures("blank_pictures")
def test_the_report_says_it_on_the_page_and_on_the_screen(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = lines(folder)
    put(folder, [*whole[:2], *whole[3:]])
    assert cli.run(["report", str(folder.path)]) == 0
    assert "note: metrics.jsonl has no line for round 3" in capsys.readouterr().err
    assert "metrics.jsonl has no line for round 3" in folder.report_path.read_text()
