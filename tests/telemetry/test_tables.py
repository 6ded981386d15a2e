from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from esper.cli import run
from esper.foundation.errors import UserError
from esper.telemetry.run_folder import RunFolder
from esper.telemetry.tables import export_run
from tests.telemetry.made_up_run import made_up_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = made_up_run(tmp_path / "run", rounds=12)
    made.close()
    return made


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_every_number_of_a_run_is_in_its_tables(folder: RunFolder, tmp_path: Path) -> None:
    files = export_run(folder, "csv", tmp_path / "tables")
    assert [file.name for file in files] == ["rounds.csv", "events.csv", "results.csv"]
    rounds, events, results = map(read_csv, files)
    for row, summary in zip(rounds, folder.metrics(), strict=True):
        assert {name: float(text) for name, text in row.items() if text} == summary.scalars()
    for row, event in zip(events, folder.events(), strict=True):
        assert (row["kind"], row["blueprint"], row["slot"]) == (event.kind, event.blueprint, event.slot)
        worth = row["numbers/contribution"]
        assert (float(worth) if worth else None) == event.numbers.get("contribution")
    comparison = folder.results()
    assert comparison is not None
    assert len(results) == sum(len(controller.members) for controller in comparison.controllers)
    assert float(results[-1]["test_accuracy"]) == comparison.controllers[-1].test_accuracy[-1]


def test_parquet_holds_the_same_or_says_what_is_missing(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="needs the package pyarrow"):
        export_run(folder, "parquet", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    monkeypatch.undo()
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    files = export_run(folder, "parquet", tmp_path / "tables")
    table = parquet.read_table(files[0])
    assert table.column("return_mean").to_pylist() == [summary.return_mean for summary in folder.metrics()]


def test_the_command_says_what_it_wrote(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(folder.path), "--csv"]) == 0
    assert f"wrote {folder.path / 'tables' / 'rounds.csv'}" in capsys.readouterr().out
    with RunFolder.create(tmp_path / "young", config="seed: 1\n", seed=1):
        assert run(["export", str(tmp_path / "young")]) == 2
    assert "holds no rounds" in capsys.readouterr().err
