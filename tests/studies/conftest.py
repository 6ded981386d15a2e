"""A tiny evaluation, run once for all tests that look at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies import setting
from studies.evaluation import Request, evaluate_task
from studies.records import Evaluation
from tests.studies.worlds import MEMBERS, TINY, task


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of every program's results on spirals; few draws of initial seeds make it ready soon."""
    folder = tmp_path_factory.mktemp("results")
    whole = setting.recipe

    def small(batches: int, graphs: bool, chunk: int) -> object:
        return whole(batches, graphs, chunk).model_copy(update={"seed_weights": 1, "initial_weights": 8})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setting, "recipe", small)
        evaluate_task(TINY, task(), Request(members=MEMBERS, out=folder))
    return folder


@pytest.fixture(scope="session")
def found(results: Path) -> Evaluation:
    return Evaluation.read(results / f"evaluation-{task().name}.json")
