from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esper.runs.files import JsonLines
from esper.runs.schema import Event
from esper.watch.reading import MOST_TOLD, round_events
from tests.runs.made_up_run import made_up_run


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    wanted=st.integers(0, 13),
    damage=st.lists(st.integers(0, 60), max_size=3),
    torn=st.booleans(),
)
def test_halving_finds_what_reading_all_of_it_finds(
    tmp_path: Path, counts: list[int], wanted: int, damage: list[int], torn: bool
) -> None:
    events = [
        Event(round=number + 1, step=0, member=i, kind="germinated", blueprint="NORM")
        for number, count in enumerate(counts)
        for i in range(count)
    ]
    file = tmp_path / "events.jsonl"
    file.unlink(missing_ok=True)
    JsonLines(file).append(events)
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    for place in damage:
        lines.insert(min(place, len(lines)), b"no line of ours\n")
    file.write_bytes(b"".join(lines) + (b'{"round":3,"st' if torn else b""))
    found = round_events(file, wanted)
    assert found["events"] == [event for event in events if event.round == wanted]
    assert found["total"] == len(found["events"])


def test_a_round_is_summed_up_by_kind_and_blueprint(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run")
    found = round_events(folder.events_file.path, 5)
    assert found["kinds"]["germinated"] == 6
    assert sum(entry["planted"] for entry in found["ledger"]) == 6
    one = round_events(folder.events_file.path, 5, member=2)
    assert {event.member for event in one["events"]} == {2}
    folder.close()


def test_more_events_than_may_be_told_are_counted(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "events.jsonl")
    file.append(Event(round=1, step=0, member=i, kind="germinated") for i in range(MOST_TOLD + 5))
    found = round_events(file.path, 1)
    assert len(found["events"]) == MOST_TOLD
    assert found["total"] == MOST_TOLD + 5
    assert round_events(tmp_path / "nothing.jsonl", 1)["total"] == 0
