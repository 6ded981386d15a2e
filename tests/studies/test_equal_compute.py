"""Arms of a study spend the same FLOPs, and what is written can be read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from esper.population.config import PopulationConfig
from esper.tasks import load_task
from studies import equal_compute_page
from studies.equal_compute import Arm, Setting, choose_rate, read, run_arm, table, write

HOST = {"width": 4, "depth": 1, "stages": 1, "hidden": 4}
FIXED = Arm("fixed", HOST)
GROWN = Arm("grown", HOST, ((0.3, "clone", "all"),), folds=1)


def setting() -> Setting:
    config = PopulationConfig(batch_size=8, batches_per_epoch=2, validation_samples=32, schedule="flat")
    return Setting(load_task("digits"), "resnet", 3e7, config)


def test_arms_of_other_sizes_spend_equal_flops_and_come_back_from_their_file(tmp_path: Path) -> None:
    results = [run_arm(arm, setting(), 2, 1.0) for arm in (FIXED, GROWN)]
    for result in results:
        np.testing.assert_allclose(result.spent, [3e7, 3e7])
        assert result.curve[0][0] == 0.0
        assert np.isfinite(result.test_loss).all()
    assert np.less(results[0].parameters, results[1].parameters).all()
    write(results, tmp_path / "lines.jsonl", setting())
    assert read(tmp_path / "lines.jsonl") == results
    assert [line.split(" | ")[0] for line in table(results).splitlines()[2:]] == ["| fixed", "| grown"]


def test_a_rate_that_breaks_training_is_not_chosen() -> None:
    assert choose_rate(FIXED, setting(), (1.0, 1e6)) == pytest.approx(1.0)


def test_the_tables_of_the_page_are_what_its_files_give() -> None:
    """If this fails: python -m studies.equal_compute_page"""
    page = equal_compute_page.PAGE.read_text(encoding="utf-8")
    assert equal_compute_page.page_with_tables(page) == page
