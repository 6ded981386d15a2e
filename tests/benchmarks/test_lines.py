"""Committed results can be shown again; a file of something else is refused in a sentence."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import loop, population
from benchmarks.lines import line_of, read_results

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("h200-loop.jsonl", loop.Result),
        ("h200-loop-profile.jsonl", loop.Result),
        ("h200-population.jsonl", population.Result),
    ],
)
def test_committed_lines_are_read_and_written_back(name: str, kind: type, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    found, machine = read_results(parser, RESULTS / name, kind)
    assert found
    assert machine == "NVIDIA H200"
    copy = tmp_path / name
    copy.write_text("\n".join(line_of(result, machine) for result in found))
    assert str(read_results(parser, copy, kind)) == str((found, machine))  # NaN is not equal to itself


@pytest.mark.parametrize("text", ["", "words", "[1]", '{"device": "x", "unknown": 1}'])
def test_a_file_of_something_else_ends_with_a_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit) as left:
        read_results(argparse.ArgumentParser(), path, loop.Result)
    assert left.value.code == 2
    assert "give a file that --json wrote" in capsys.readouterr().err
