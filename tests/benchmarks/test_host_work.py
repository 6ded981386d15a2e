"""The benchmark of what is left to the host counts what replays leave over."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.host_work import Count, Host, trainer_of
from tests.operations import count_operations


@pytest.mark.long
def test_replays_leave_a_small_part_of_the_operations_to_the_host() -> None:
    asked = argparse.Namespace(
        work="digits", members=4, steps=3, clock="compute", chunk=None, precision="float32", device="cpu"
    )
    plain = trainer_of(asked)
    plain.play_round()
    whole = count_operations(plain.play_round)
    host = Host()
    with host.replaying():
        trainer = trainer_of(asked)
        for _ in range(4):
            trainer.play_round()
        host.replays = 0
        with Count(host):
            trainer.play_round()
    assert host.replays > 10 * asked.steps
    assert 0 < sum(host.operations.values()) < whole / 10
