"""A variant is judged by what one more training of the same controller might have done."""

from __future__ import annotations

import pytest

from studies.ablation_tables import variants_table
from studies.records import Arm, Evaluation


def arm(name: str, worth: float) -> Arm:
    members = [worth - 0.01, worth, worth + 0.01]
    return Arm(name, members, members, [1, 1, 1], members, [1.0], [0], [0.0], [0.0], program="arms")


def evaluation(**worths: float) -> Evaluation:
    arms = [arm(name.replace("_seed_", "-"), worth) for name, worth in worths.items()]
    return Evaluation("digits", "cnn", 1, 3, 1, 1, arms=arms)


@pytest.mark.parametrize(("worth", "beyond"), [(0.90, "above"), (0.62, ""), (0.30, "below")])
def test_only_what_no_other_training_would_reach_is_beyond(worth: float, beyond: str) -> None:
    """Trainings at .59, .6 and .61: another one may lie .05 off."""
    found = evaluation(main_seed_0=0.59, main_seed_1=0.60, main_seed_2=0.61, no_memory_seed_0=worth)
    line, mean = variants_table({"digits": found}).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["no_memory", "digits", f"{worth - 0.6:+.4f} ± 0.0000", "± 0.0497", beyond]
    assert mean == line.replace("digits", "mean")  # of one task


def test_a_study_without_variants_has_an_empty_table() -> None:
    assert len(variants_table({"digits": evaluation(main_seed_0=0.6)}).splitlines()) == 2
