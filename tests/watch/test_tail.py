from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esper.watch import reading
from esper.watch.reading import Position, read_on

START = Position()


def read_all(path: Path, position: Position = START) -> tuple[list[str], Position, int]:
    lines: list[str] = []
    damaged = 0
    while (piece := read_on(path, position)) is not None:
        lines, position, damaged = lines + piece.lines, piece.position, damaged + piece.damaged
    return lines, position, damaged


def test_a_torn_last_line_is_held_back_until_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_on(file, Position()) is None
    file.write_text('{"round":1}\n{"rou')
    lines, position, _ = read_all(file)
    assert lines == ['{"round":1}']
    assert position.offset == 12
    file.write_text('{"round":1}\n{"round":2}\n')
    assert read_all(file, position)[0] == ['{"round":2}']


def test_damaged_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"round":1}\n\xff\xfe\n[1]\n{"kl":NaN}\n\n{"round":2}\n')
    lines, _, damaged = read_all(file)
    assert lines == ['{"round":1}', '{"round":2}']
    assert damaged == 3


@pytest.mark.parametrize(
    "later", ['{"round":1}\n', '{"round":1}\n{"round":9,"other":1}\n{"round":10}\n', None]
)
def test_a_file_that_was_cut_replaced_or_removed_begins_anew(tmp_path: Path, later: str | None) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"round":1}\n{"round":2}\n')
    _, position, _ = read_all(file)
    if later is None:
        file.unlink()
    else:
        file.write_text(later)
    piece = read_on(file, position)
    assert piece is not None
    assert piece.restarted
    assert piece.lines == ([] if later is None else later.splitlines())


def test_a_file_that_only_grew_does_not_begin_anew(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"round":1}\n')
    _, position, _ = read_all(file)
    file.write_text('{"round":1}\n{"round":2}\n')
    piece = read_on(file, Position.parse(str(position)))
    assert piece is not None
    assert not piece.restarted
    assert piece.lines == ['{"round":2}']


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=40), max_size=3), max_size=12),
    cuts=st.lists(st.integers(0, 600), max_size=6),
    chunk=st.integers(1, 50),
)
def test_whatever_the_writes_every_line_comes_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    records: list[dict[str, str]],
    cuts: list[int],
    chunk: int,
) -> None:
    monkeypatch.setattr(reading, "CHUNK", chunk)
    file = tmp_path / "lines"
    file.unlink(missing_ok=True)
    data = b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)
    seen, position = [], Position()
    for end in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        file.write_bytes(data[:end])
        more, position, _ = read_all(file, position)
        seen += more
    assert [json.loads(line) for line in seen] == records


@pytest.mark.parametrize("text", ["", "x", "12", "12-zz", "-5-0", "1-2-3", "9" * 30 + "-0"])
def test_a_position_that_makes_no_sense_is_the_beginning(text: str) -> None:
    assert Position.parse(text) == Position()


def test_a_position_behind_the_end_of_any_file_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"round":1}\n')
    piece = read_on(file, Position.parse(f"{2**63 - 1}-0"))
    assert piece is not None
    assert piece.restarted
    assert read_all(file, piece.position)[0] == ([] if piece.lines else ['{"round":1}'])


def test_a_line_holds_no_carriage_return(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"round":1}\r\n{"round":\r2}\r\n\r\n{"a":"\r"}\r\n')
    lines, _, damaged = read_all(file)
    assert lines == ['{"round":1}', '{"round": 2}']
    assert damaged == 1  # inside a string it is not JSON
