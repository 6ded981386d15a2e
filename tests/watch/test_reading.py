"""Which runs are found, and what is read of files that somebody else may be writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esper.runs.files import JsonLines, file_in
from esper.runs.schema import Event
from esper.utils.errors import UserError
from esper.watch import reading
from esper.watch.reading import (
    MAX_EVENTS,
    Position,
    blueprint_ledger,
    last_line,
    read_new_lines,
    round_events,
)
from esper.watch.server import Library

START = Position()
examples = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def make_run(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "versions.json").write_text("{}")
    return path


def test_runs_are_found_by_unique_names_as_they_appear(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "deep" / "b")
    make_run(tmp_path / "runs" / "too" / "deep" / "c")
    alone = make_run(tmp_path / "alone")
    library = Library([tmp_path / "runs", alone])
    assert list(library.runs()) == ["a", "deep/b", "alone"]
    make_run(tmp_path / "runs" / "late")
    assert list(library.runs()) == ["a", "deep/b", "late", "alone"]
    one, two = make_run(tmp_path / "x" / "demo"), make_run(tmp_path / "y" / "demo")
    assert Library([one, two, one, tmp_path / "x"]).runs() == {"demo": one, "y/demo": two}
    with pytest.raises(UserError, match="there is no folder at"):
        Library([tmp_path / "nothing"])


def test_nothing_beside_the_given_folders_is_found(tmp_path: Path) -> None:
    secret = make_run(tmp_path / "elsewhere" / "secret")
    run = make_run(tmp_path / "given" / "mine")
    (tmp_path / "given" / "link").symlink_to(secret)
    library = Library([tmp_path / "given"])
    assert list(library.runs()) == ["mine"]
    for name in ("", "..", "../elsewhere", "/etc", "mine/../..", "none"):
        with pytest.raises(UserError, match="there is no run"):
            library.find(name)
    (run / "metrics.jsonl").symlink_to(secret / "versions.json")
    with pytest.raises(UserError, match="leads out of the run's folder"):
        file_in(run, "metrics.jsonl")


def read_all(path: Path, position: Position = START) -> tuple[list[str], Position, int]:
    lines: list[str] = []
    damaged = 0
    while (found := read_new_lines(path, position)) is not None:
        lines, position, damaged = lines + found.lines, found.position, damaged + found.damaged
    return lines, position, damaged


def test_torn_lines_wait_and_damaged_ones_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_new_lines(file, START) is None
    assert last_line(file) is None
    file.write_bytes(b'{"round":1}\r\n\xff\xfe\n[1]\n{"kl":NaN}\n\n{"round":\r2}\n{"a":"\r"}\n{"rou')
    lines, position, damaged = read_all(file)
    assert lines == ['{"round":1}', '{"round": 2}'], "no carriage return: it would end a server-sent event"
    assert damaged == 4
    assert last_line(file) == {"round": 2}
    file.write_bytes(file.read_bytes() + b'nd":3}\n')
    found = read_new_lines(file, Position.parse(str(position)))
    assert found is not None
    assert (found.lines, found.restarted) == (['{"round":3}'], False)


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
    found = read_new_lines(file, position)
    assert found is not None
    assert found.restarted
    assert found.lines == ([] if later is None else later.splitlines())


@examples
@given(
    records=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=40), max_size=3), max_size=12),
    cuts=st.lists(st.integers(0, 600), max_size=6),
    chunk=st.integers(4, 50),  # of one byte it would open the file for each
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
    seen, position = [], START
    for end in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        file.write_bytes(data[:end])
        more, position, _ = read_all(file, position)
        seen += more
    assert [json.loads(line) for line in seen] == records


@pytest.mark.parametrize("text", ["", "x", "12", "12-zz", "-5-0", "1-2-3", "9" * 30 + "-0"])
def test_a_position_that_makes_no_sense_is_the_beginning(text: str) -> None:
    assert Position.parse(text) == START


@examples
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    wanted=st.integers(0, 13),
    damage=st.lists(st.integers(0, 60), max_size=3),
    torn=st.booleans(),
)
def test_the_events_of_a_round_are_found_among_damaged_lines(
    tmp_path: Path, counts: list[int], wanted: int, damage: list[int], torn: bool
) -> None:
    events = [
        Event(round=number + 1, step=0, member=i, kind="germinated", blueprint="NORM")
        for number, count in enumerate(counts)
        for i in range(count)
    ]
    file = tmp_path / "events.jsonl"
    file.unlink(missing_ok=True)
    JsonLines(file).append(*events)
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    for place in damage:
        lines.insert(min(place, len(lines)), b"no line of ours\n")
    file.write_bytes(b"".join(lines) + (b'{"round":3,"st' if torn else b""))
    found = round_events(file, wanted)
    assert found["events"] == [event for event in events if event.round == wanted]
    assert found["total"] == len(found["events"])
    assert {event.member for event in round_events(file, wanted, member=2)["events"]} <= {2}


def test_more_events_than_may_be_told_are_counted(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "events.jsonl")
    file.append(*(Event(round=1, step=0, member=i, kind="germinated") for i in range(MAX_EVENTS + 5)))
    found = round_events(file.path, 1)
    assert len(found["events"]) == MAX_EVENTS
    assert found["total"] == found["kinds"]["germinated"] == MAX_EVENTS + 5
    assert round_events(tmp_path / "nothing.jsonl", 1)["total"] == 0


def test_the_ledger_counts_what_became_of_seeds() -> None:
    def event(kind: str, blueprint: str | None = "NORM", **numbers: float) -> Event:
        return Event(round=1, step=1, member=0, kind=kind, blueprint=blueprint, numbers=numbers)  # type: ignore[arg-type]

    kept = event("fossilised", contribution=2.0, parameters=33.0)
    others = [event("pruned"), event("germinated", "MLP"), event("gate_refused", None)]
    first, second = blueprint_ledger([event("germinated")] * 4 + [kept, *others])
    assert (first["blueprint"], second["blueprint"]) == ("NORM", "MLP")
    assert [first[fate] for fate in ("planted", "kept", "taken out", "unfinished")] == [4, 1, 1, 2]
    assert (first["contribution"], first["parameters"]) == (2.0, 33.0)
