"""The log of a training, read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from esper.foundation.errors import UserError
from studies import training_log
from studies.command_line import run

KEYS = [key for key, _ in training_log.COLUMNS.values()]


def write_log(path: Path) -> None:
    lines = [
        {"agent": agent, "family": ("signals", "tables")[number % 2], "round": number}
        | {key: float(number) for key in KEYS}
        for number in range(12)
        for agent in ("main-0", "no_twin-0")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_table_is_of_the_last_rounds_and_the_curves_of_whole_turns(tmp_path: Path) -> None:
    write_log(tmp_path / training_log.LOG)
    agents = training_log.read(tmp_path / training_log.LOG)
    assert [(agent.name, agent.is_main) for agent in agents] == [("main-0", True), ("no_twin-0", False)]
    np.testing.assert_allclose(agents[0].over_families("kl"), np.arange(11) + 0.5)
    line = training_log.table(agents).splitlines()[2]
    assert line.startswith("| main-0 | +7.0000 | 7.00 | 7.000 |")  # the mean of 3 to 11
    training_log.picture(agents, tmp_path / training_log.PICTURE)
    assert (tmp_path / training_log.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_no_log_ends_a_study_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / training_log.LOG
    path.write_text("[1]\n")
    with pytest.raises(UserError, match="not a log"):
        training_log.read(path)
    with pytest.raises(SystemExit) as left:
        run(lambda: print(training_log.read(path)))
    assert left.value.code == 2
    assert "train again" in capsys.readouterr().err


def test_kinds_are_compared_over_their_trainings() -> None:
    """Two trainings of one kind, at 0 1 2 ... and 2 3 4 ...: a part's mean lies between them."""
    rows = [
        [{"above_twin": float(start + number), "explained_variance": 0.25} for number in range(6)]
        for start in (0, 2)
    ]
    agents = [training_log.Agent(f"main-{seed}", several) for seed, several in enumerate(rows)]
    head, _, line = training_log.kinds_table(agents).splitlines()
    assert (
        head
        == "| controller | trainings | rounds 1 to 2 | rounds 3 to 4 | rounds 5 to 6 | V explains, at last |"
    )
    assert line.startswith("| main | 2 | +1.5000 ± 12.7062 | +3.5000 ± ")
    assert line.endswith("| +0.25 ± 0.00 |")
