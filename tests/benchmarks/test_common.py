"""Committed results can be read again; a file of something else is refused in a sentence."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.common import line_of, read_results
from benchmarks.population import Result

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_committed_lines_are_read_and_written_back(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    found, machine = read_results(parser, RESULTS / "h200-population.jsonl", Result)
    assert machine == "NVIDIA H200"
    copy = tmp_path / "lines.jsonl"
    copy.write_text("\n".join(line_of(result, machine) for result in found))
    assert read_results(parser, copy, Result) == (found, machine)


@pytest.mark.parametrize("text", ["", "words", "[1]", '{"device": "x", "unknown": 1}'])
def test_a_file_of_something_else_ends_with_a_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit) as left:
        read_results(argparse.ArgumentParser(), path, Result)
    assert left.value.code == 2
    assert "give a file that --json wrote" in capsys.readouterr().err
