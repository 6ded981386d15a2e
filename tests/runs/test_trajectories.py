from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from esper.runs.trajectories import COLUMNS, TrajectoryFolder, kept_rounds
from esper.utils.errors import UserError
from tests.runs.made_up import made_up_trajectories


def test_columns_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder, trajectories = TrajectoryFolder(tmp_path), made_up_trajectories(round=7)
    assert folder.rounds() == []
    folder.write(trajectories)
    assert folder.rounds() == [7]
    back = load(folder.read_bytes(7))
    assert set(back) == set(trajectories.columns) <= set(COLUMNS)
    for name, column in trajectories.columns.items():
        np.testing.assert_array_equal(back[name], column)


@given(latest=st.integers(1, 3000), kept=st.integers(1, 40))
def test_the_rounds_that_stay_are_few_and_once_dropped_is_dropped_for_good(latest: int, kept: int) -> None:
    now, next_round = kept_rounds(latest, kept), kept_rounds(latest + 1, kept)
    assert latest in now
    assert len(now) <= kept
    assert next_round - {latest + 1} <= now
    assert len(now) >= min(latest, kept // 2)


def test_old_rounds_are_dropped_as_new_ones_come(tmp_path: Path) -> None:
    folder = TrajectoryFolder(tmp_path)
    for number in range(1, 31):
        folder.write(made_up_trajectories(number, members=2, steps=3), kept=6)
    assert folder.rounds() == [8, 16, 24, 28, 29, 30]
    folder.truncate_after(25)
    assert folder.rounds() == [8, 16, 24]


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        TrajectoryFolder(tmp_path).read_bytes(3)
