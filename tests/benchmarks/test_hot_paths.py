"""The benchmarks run, say what they promise to say, and compare like with like."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks.hot_paths import features_by_slot, main, masks_preallocated
from esper.lifecycle.slot_states import SlotConfig
from tests.operations import count_operations
from tests.scenes import random_observation
from tests.tamiyo.features_by_element import features_one_by_one, to_reports
from tests.tamiyo.masks_by_member import masks_one_by_one, to_mask_states


def test_json_prints_one_object_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["masks", "features", "--members", "2", "4", "--slots", "3", "--seconds", "0", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["work"], r["n"], r["slots"]) for r in rows] == [
        ("masks", 2, 3), ("masks", 4, 3), ("features", 2, 3), ("features", 4, 3),
    ]  # fmt: skip
    for row in rows:
        assert set(row) == {"work", "n", "slots", "ours_ms", "baseline_ms", "ratio", "ops"}
        assert row["ratio"] == pytest.approx(row["baseline_ms"] / row["ours_ms"])
        assert row["ops"] > 0


def test_an_unknown_work_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "unknown work nonsense; there are" in capsys.readouterr().err


def test_operations_are_counted() -> None:
    x = torch.ones(3)
    assert count_operations(lambda: x + x) == 1
    assert count_operations(lambda: (x + x).sum()) == 2


def test_the_mends_of_the_review_compute_what_the_baselines_compute() -> None:
    observation, config = random_observation(np.random.default_rng(0), 5, 3), SlotConfig.grid(1, 3)
    objects, reports = to_mask_states(observation.slots), to_reports(observation, config)
    plain, mended = masks_one_by_one(objects, config), masks_preallocated(objects, config)
    assert all(torch.equal(plain[key], mended[key]) for key in plain)
    assert torch.equal(features_one_by_one(reports, config), features_by_slot(reports, config))
