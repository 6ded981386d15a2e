"""Arms of a study spend the same FLOPs, and what is written can be read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from esper.population.config import PopulationConfig
from esper.tasks import load_task
from esper.utils.gather import Gather
from studies import equal_compute_page
from studies.equal_compute import Arm, Result, Setting, read, run_arm, run_arms, table, write
from tests.shards import on_processes

TASK = load_task("digits")
HOST = {"width": 4, "depth": 1, "stages": 1, "hidden": 4}
FIXED = Arm("fixed", HOST)
GROWN = Arm("grown", HOST, "clone@0.3", folds=1)


def setting() -> Setting:
    config = PopulationConfig(batch_size=8, batches_per_epoch=2, validation_samples=32, schedule="flat")
    return Setting(TASK, "resnet", 1.5e7, config)


def test_arms_of_other_sizes_spend_equal_flops_and_come_back_from_their_file(tmp_path: Path) -> None:
    results = [run_arm(arm, setting(), 2, 1.0) for arm in (FIXED, GROWN)]
    for result in results:
        np.testing.assert_allclose(result.spent, [1.5e7, 1.5e7])
        assert result.curve[0][0] == 0.0
        assert np.isfinite(result.test_loss).all()
    assert np.less(results[0].parameters, results[1].parameters).all()
    write(results, tmp_path / "lines.jsonl", setting())
    assert read(tmp_path / "lines.jsonl") == results
    assert [line.split(" | ")[0] for line in table(results).splitlines()[2:]] == ["| fixed", "| grown"]


def test_processes_take_an_arm_each_and_the_first_writes_what_one_process_finds(tmp_path: Path) -> None:
    arms = (FIXED, replace(FIXED, name="also fixed"), GROWN)

    def work(gather: Gather, folder: str = "shared") -> list[Result]:
        path = tmp_path / folder / f"{gather.rank}.jsonl"
        return run_arms(
            arms, replace(setting(), flops=8e6), 1, lambda arm: 0.5 + bool(arm.schedule), path, gather
        )

    def without_clock(results: list[Result]) -> list[Result]:
        return [replace(result, seconds=0.0) for result in results]

    alone = without_clock(work(Gather(), "alone"))
    assert [(result.arm, result.rate) for result in alone] == [
        ("fixed", 0.5),
        ("also fixed", 0.5),
        ("grown", 1.5),
    ]
    assert [without_clock(found) for found in on_processes(2, work)] == [alone, alone]
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["0.jsonl"]
    assert without_clock(read(tmp_path / "shared" / "0.jsonl")) == alone


def test_the_tables_of_the_page_are_what_its_files_give() -> None:
    """If this fails: python -m studies.equal_compute_page"""
    page = equal_compute_page.PAGE.read_text(encoding="utf-8")
    assert equal_compute_page.page_with_tables(page) == page
