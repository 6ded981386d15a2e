"""The report: the page of a run as one file. That it shows in a browser is tested in test_page.py."""

from __future__ import annotations

import gzip
import json
import re
import time
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esper import cli
from esper.runs.run_folder import RunFolder
from esper.runs.schema import (
    Comparison,
    ControllerResult,
    Curve,
    Growth,
    RoundSummary,
    SavedNetwork,
    SavedSlot,
    paired_differences,
)
from esper.watch.report import render_report, write_report
from tests.runs.made_up import made_up_trajectories, trained


def answers(page: str) -> dict[str, Any]:
    """What a page has embedded, by question."""
    embedded = page.split('<script type="application/json" id="answers">')[1].split("</script>")[0]
    found = json.loads(embedded)
    for question, answer in found.items():
        if isinstance(answer, str):
            data = gzip.decompress(b64decode(answer))
            found[question] = data if question.startswith("api/trajectories") else json.loads(data)
    return dict(found)


def test_the_page_stands_alone_whatever_the_run_says(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!--<script>"
    path = tmp_path / "a <b> & </title><script>alert(2)<"
    with RunFolder.create(path, config=f"note: {json.dumps(hostile)}\n", seed=1, command=[hostile]) as folder:
        folder.metrics_file.append(replace(_round(1), anomalies=[hostile]))
        page = render_report(folder.path)
    scripts = re.findall(r"<script[^>]*>.*?</script>", page, re.S)
    assert len(scripts) == page.count("<script") == 4, "uPlot, the import map, the answers, the page's own"
    sources = re.findall(r' (?:src|href)="(.*?)"', re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S))
    assert all(source.startswith(("data:", "#")) for source in sources)
    assert "alert(2)<" not in re.sub(r"<title>.*</title>", "", page)
    found = answers(page)
    assert found["api/facts"]["config"]["note"] == hostile
    assert found["api/rounds"]["lines"][0]["anomalies"] == [hostile]
    assert found["api/runs"] == [{"name": path.name, "state": "finished"}]


def _round(number: int, rounds: int = 1) -> RoundSummary:
    return RoundSummary(number, rounds, members=1, member_epochs=5, seconds=1.0, return_mean=0.2)


def test_every_question_of_the_page_has_its_answer(tmp_path: Path) -> None:
    with trained(tmp_path / "run", rounds=5, members=4) as folder:
        found = answers(render_report(folder.path))
    kept = folder.trajectories.rounds()
    assert set(found) == {"api/runs", "api/facts", "api/rounds"} | {
        f"api/{kind} {number}" for number in kept for kind in ("events", "trajectories")
    }
    assert found["api/runs"][0]["state"] == "stopped", "a file runs no more, whoever still writes the folder"
    assert [line["round"] for line in found["api/rounds"]["lines"]] == [1, 2, 3, 4, 5]
    assert found[f"api/trajectories {kept[-1]}"] == folder.trajectories.read_bytes(kept[-1])
    assert found[f"api/events {kept[-1]}"]["total"] > 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "results.json", "config.yaml"])
def test_a_link_out_of_the_folder_is_named_and_the_rest_is_written(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"round": 1, "password": "hunter2"}\n')
    with trained(tmp_path / "run", rounds=2, members=4) as folder:
        (folder.path / name).unlink(missing_ok=True)
        (folder.path / name).symlink_to(secret)
        page = render_report(folder.path)
    found = answers(page)
    assert f"{name} leads out of the run's folder" in found["api/facts"]["problems"]
    assert any(question.startswith("api/trajectories") for question in found)
    assert "hunter2" not in json.dumps(found, default=str)


def test_a_large_run_is_thinned_to_three_megabytes_in_two_seconds(tmp_path: Path) -> None:
    trajectories, took = made_up_trajectories(members=2048), []
    with trained(tmp_path / "run", rounds=2400, of=2400, members=2) as folder:
        for number in range(2389, 2401):
            folder.trajectories.write(replace(trajectories, round=number), 12)
        for _ in range(2):  # the quicker one counts: the machine may be busy with something else
            begun = time.process_time()
            page = write_report(folder)
            took.append(time.process_time() - begun)
            if took[-1] < 2:
                break
    assert min(took) < 2
    assert page.stat().st_size < 3_000_000
    found = answers(page.read_text(encoding="utf-8"))
    rounds = [line["round"] for line in found["api/rounds"]["lines"]]
    assert len(rounds) == 1200
    assert rounds[-1] == 2400
    assert "api/trajectories 2400" in found
    assert "api/trajectories 2389" not in found


def test_what_came_of_a_comparison_is_said_first(tmp_path: Path) -> None:
    def result(name: str, gain: float) -> ControllerResult:
        accuracy = [0.5 + gain + 0.001 * i for i in range(4)]
        return ControllerResult(name, [0, 1, 2, 3], accuracy, [9.0] * 4, [2.0] * 4, [1e9] * 4)

    arms = [result("static", 0.0), result("habit", 0.1), result("fixed:hidden=9", 0.3)]
    with RunFolder.create(tmp_path / "run", config="", seed=1, kind="compare") as folder:
        folder.write(Comparison("digits", "cnn", arms, paired_differences(arms), ["an arm did not grow"]))
    facts = answers(render_report(folder.path))["api/facts"]
    first, second, remark = facts["outcome"]["sentences"]
    assert first.startswith("fixed:hidden=9 is above static: +30.0")
    assert second.startswith("habit is above static: +10.0")
    assert remark == "An arm did not grow."


@pytest.mark.parametrize("grew", [True, False])
def test_what_grew_is_told_beside_the_score_without_it(tmp_path: Path, grew: bool) -> None:
    slot = SavedSlot("r0c0", "FOSSILIZED", "CONV_LIGHT", "LINEAR_ADD", 1.0, 2.5)
    slots = [slot if grew else SavedSlot("r0c0", "DORMANT")]
    sizes = (100, 250 if grew else 100)
    network = SavedNetwork("digits", "cnn(width=4)", "habit", 3, 8, 24, *sizes, 0.9, 0.88, 0.8, slots)
    with RunFolder.create(tmp_path / "run", config="task: digits", seed=1, kind="grow") as folder:
        folder.write(network)
        outcome = answers(render_report(folder.path))["api/facts"]["outcome"]
        assert "88.0% test accuracy" in outcome["sentences"][0]
        assert "without growth has 80.0% with 100" in outcome["sentences"][0]
        removed = "CONV_LIGHT at r0c0: the validation accuracy falls by 2.5 points if it is removed"
        assert outcome["grew"] == [
            removed if grew else "nothing: the network has the size that it began with"
        ]
        curves = [Curve("grown", [0.5, 0.9], [100, sizes[1]], [0, 1e6])]
        verdicts = ["nothing was planted, because the budget is too small"]
        folder.write(Growth("Net", "habit", "accuracy", 1, True, curves, verdicts))
        outcome = answers(render_report(folder.path))["api/facts"]["outcome"]
    assert "reached a validation accuracy of 0.900" in outcome["sentences"][0]
    assert outcome["sentences"][1] == "Nothing was planted, because the budget is too small."


def test_an_empty_run_gets_a_page_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "run", config="", seed=1)
    assert cli.run(["report", str(folder.path)]) == 0
    assert "report.html" in capsys.readouterr().out
    page = folder.report_path.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert answers(page)["api/facts"]["outcome"]["sentences"] == []
