"""Plans against loops over members and slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.actions import GROWTH_BLUEPRINTS, NUM_BLUEPRINTS, STYLE_BLEND, Blend, Style
from esper.lifecycle.slot_states import AlphaMode
from esper.lifecycle.stages import FORWARD_STAGES, SEED_STAGES, Stage
from esper.population.forms import NO_FORM, FormCodes
from esper.population.plan.packing import Plan, PlanSpec, widened_span
from esper.population.plan.rows import NO_BLEND, NO_ROW, Rows, SlotView, measurement_rows, training_rows
from tests.slots import SlotRecord, states_from_records

CPU = torch.device("cpu")
STAGES = [stage for stage in Stage if stage is not Stage.UNKNOWN]
ALPHAS = [0.0, 0.25, 0.5, 1.0]


@st.composite
def records(draw: st.DrawFn) -> SlotRecord:
    stage = draw(st.sampled_from(STAGES))
    return SlotRecord(
        stage=stage,
        blueprint=draw(st.sampled_from([1, 2, 3, 13, 14, 15])) if stage in SEED_STAGES else -1,
        style=draw(st.sampled_from(list(Style))),
        alpha=draw(st.sampled_from(ALPHAS)),
        alpha_mode=draw(st.sampled_from(list(AlphaMode))),
    )


@st.composite
def crowds(draw: st.DrawFn) -> list[list[SlotRecord]]:
    slots = draw(st.integers(1, 4))
    row = st.lists(records(), min_size=slots, max_size=slots)
    return draw(st.lists(row, min_size=1, max_size=5))


def heard_alphas(row: list[SlotRecord]) -> list[float]:
    return [r.alpha if r.stage in FORWARD_STAGES else 0.0 for r in row]


CODES = FormCodes(classes=3)
Chains = list[list[list[int]]]  # by member and slot: the forms that were folded in, first to last


@st.composite
def chains(draw: st.DrawFn, crowd: list[list[SlotRecord]]) -> Chains:
    """Up to three parts in every slot, blocks and plain ones."""
    part = st.sampled_from([1, 3, CODES.block, CODES.block + 1, CODES.lead])
    return [[draw(st.lists(part, max_size=3)) for _ in row] for row in crowd]


@st.composite
def grown_crowds(draw: st.DrawFn) -> tuple[list[list[SlotRecord]], Chains]:
    crowd = draw(crowds())
    return crowd, draw(chains(crowd))


def chain_blend(form: int) -> Blend:
    """How the parts of these tests blend once they are folded in."""
    return Blend.ADD if form >= CODES.block else Blend(form % len(Blend))


def view_of(crowd: list[list[SlotRecord]], folded: Chains | None = None) -> SlotView:
    shape = (len(crowd), len(crowd[0]))
    form = torch.full((*shape, 4), NO_FORM)
    blend = torch.zeros((*shape, 3), dtype=torch.long)
    for i, row in enumerate(crowd):
        for s, r in enumerate(row):
            form[i, s, 0] = r.blueprint
            for k, part in enumerate(folded[i][s] if folded else []):
                form[i, s, k + 1], blend[i, s, k] = part, int(chain_blend(part))
    nothing_waits = torch.tensor([NO_BLEND, NO_FORM, 0]).expand(*shape, 3)  # and nobody is finished
    return SlotView.read(states_from_records(crowd), form, blend, nothing_waits)[0]


def as_lists(rows: Rows) -> list[tuple[int, list[float], int]]:
    return list(zip(rows.member.tolist(), rows.alpha.tolist(), rows.fork.tolist(), strict=True))


@settings(max_examples=40, deadline=None)
@given(crowds())
def test_training_rows_equal_a_loop(crowd: list[list[SlotRecord]]) -> None:
    expected = [(i, heard_alphas(row), NO_ROW) for i, row in enumerate(crowd)]
    for s in range(len(crowd[0])):
        for i, row in enumerate(crowd):
            if row[s].stage == Stage.TRAINING:
                shadow = heard_alphas(row)
                shadow[s] = 1.0
                expected.append((i, shadow, s))
    assert as_lists(training_rows(view_of(crowd))) == expected


def subset_row(found: Rows, row: int) -> tuple[int, list[float]]:
    return int(found.member[row]), found.alpha[row].tolist()


@settings(max_examples=40, deadline=None)
@given(crowds(), st.booleans())
def test_measurement_rows_equal_a_loop_and_no_subset_is_there_twice(
    crowd: list[list[SlotRecord]], ablate: bool
) -> None:
    found = measurement_rows(view_of(crowd), ablate)
    subsets: set[tuple[int, tuple[float, ...]]] = set()
    for i, row in enumerate(crowd):
        own = heard_alphas(row)
        assert subset_row(found, i) == (i, own)
        subsets.add((i, tuple(own)))
        for s, r in enumerate(row):
            asked = {  # by table
                0: (own[s] > 0, [0.0 if k == s else a for k, a in enumerate(own)]),
                1: (r.stage == Stage.TRAINING, [1.0 if k == s else a for k, a in enumerate(own)]),
            }
            for name, (wanted, alphas) in asked.items():
                place = int(found.tables[name][i, s])
                if wanted and ablate:
                    assert subset_row(found, place) == (i, alphas)
                    subsets.add((i, tuple(alphas)))
                else:
                    assert place == NO_ROW
    assert len(found.member) == len(subsets)  # each distinct subset once
    assert not found.isolates


@pytest.mark.parametrize(("members", "slots"), [(8, 61), (3, 130), (64, 58)])
def test_measurement_rows_hold_for_many_slots(members: int, slots: int) -> None:
    """More slots than an int64 has bits for each member."""
    records = [[SlotRecord() for _ in range(slots)] for _ in range(members)]
    records[-1][0] = records[-1][-1] = SlotRecord(stage=Stage.HOLDING, blueprint=3, alpha=0.5)
    records[0][-2] = SlotRecord(stage=Stage.TRAINING, blueprint=3)
    found = measurement_rows(view_of(records))
    assert found.member.tolist() == [*range(members), members - 1, 0, members - 1]
    assert found.fork[members:].tolist() == [0, slots - 2, slots - 1]
    assert [row[row > 0].tolist() for row in found.alpha[members:]] == [[0.5], [1.0], [0.5]]
    without, shadow = found.tables
    assert without[-1, [0, -1]].tolist() == [members, members + 2]
    assert shadow[0, -2] == members + 1
    assert (without >= 0).sum() + (shadow >= 0).sum() == 3


def fork_of(rows: Rows, row: int) -> int:
    """The first slot where a row's alphas differ from those of its member's own row, −1 for none."""
    own = rows.alpha[rows.member[row]]
    return next((s for s, a in enumerate(rows.alpha[row]) if a != own[s]), NO_ROW)


def check_forks(plan: Plan, rows: Rows) -> None:
    """Rows come in the order of their forks; each continues its member's row there and its own after.

    A row forks at the seed of a slot, behind what was folded in there.
    """
    forks = [fork_of(rows, r) for r in range(len(rows.member))]
    assert rows.fork.tolist() == forks == sorted(forks)
    for s, stations in enumerate(plan.stations):
        for work in stations:
            there = s + 1 if work.position == 0 else s
            assert work.before == sum(f < s for f in forks)
            assert work.after == len(work.base) == len(work.entry) == sum(f < there for f in forks)
            forked = work.position == 0
            came_from = [int(rows.member[r]) if forks[r] == s and forked else r for r in range(work.after)]
            assert work.base.tolist() == came_from
            assert work.source.tolist() == [came_from[r] for r in work.rows.tolist()]


@dataclass(frozen=True)
class Met:
    """A part that a row meets, as a loop finds it."""

    form: int
    part: int
    alpha: float
    blend: Blend


def met_by(
    rows: Rows, r: int, s: int, place: int, crowd: list[list[SlotRecord]], folded: Chains
) -> Met | None:
    """What a row meets at a place of a slot."""
    member = int(rows.member[r])
    index = (place * len(crowd) + member) * len(crowd[0]) + s
    if place:
        if len(folded[member][s]) < place:
            return None
        form = folded[member][s][place - 1]
        return Met(form, index, 1.0, chain_blend(form))
    seed, alpha = crowd[member][s], float(rows.alpha[r, s])
    grows = seed.blueprint in GROWTH_BLUEPRINTS
    blend = Blend.ADD if grows else STYLE_BLEND[Style(seed.style)]
    return Met(seed.blueprint, index, alpha, blend) if alpha > 0 else None


def check_readings(plan: Plan, crowd: list[list[SlotRecord]], folded: Chains) -> None:
    """Every widening reads what the last block of its slot was given; one that forks there, a constant."""
    for s, stations in enumerate(plan.stations):
        seeds = next((work for work in stations if work.position == 0), None)
        wide = [] if seeds is None else range(len(seeds.rows))[widened_span(seeds.groups)]
        for work in (work for work in stations if work.position > 0):
            blocks = any(group.form >= NUM_BLUEPRINTS for group in work.groups)
            beside, read_by = [], [NO_ROW] * work.before
            for k, entry in enumerate(wide):
                assert seeds is not None
                row, source = int(seeds.rows[entry]), int(seeds.source[entry])
                chain = folded[int(plan.members[row])][s]
                last = max((p for p, form in enumerate(chain, 1) if form >= NUM_BLUEPRINTS), default=0)
                beside.append(source if last == work.position else NO_ROW)
                if last == work.position and row == source:
                    read_by[row] = k
            assert work.beside.tolist() == (beside if blocks else [])
            assert work.read_by.tolist() == read_by


def check_plan(plan: Plan, rows: Rows, crowd: list[list[SlotRecord]], folded: Chains) -> None:
    check_forks(plan, rows)
    check_readings(plan, crowd, folded)
    learns = iter(plan.learning_entry.tolist())
    live_members, live_slots = iter(plan.live_member.tolist()), iter(plan.live_slot.tolist())
    met_parts = enumerate(plan.live[plan.live_index].tolist())
    assert plan.members.tolist() == rows.member.tolist()
    assert plan.own == len(crowd)
    for s in range(len(crowd[0])):
        works = {work.position: work for work in plan.stations[s]}
        assert list(works) == [p for p in (1, 2, 3, 0) if p in works]  # the seed is met last
        for place in (1, 2, 3, 0):
            there = [r for r in range(len(rows.member)) if rows.fork[r] < s + (place == 0)]
            met = {r: found for r in there if (found := met_by(rows, r, s, place, crowd, folded))}
            if place not in works:
                assert met == {}
                continue
            work = works[place]
            assert sorted(work.rows.tolist()) == sorted(met)
            assert [r for r in work.entry.tolist() if r != NO_ROW] == [
                work.rows.tolist().index(r) for r in range(work.after) if r in met
            ]
            names = [group.form for group in work.groups]
            assert names == sorted(set(names))
            entries = zip(work.rows.tolist(), work.alpha.tolist(), work.blend.tolist(), strict=True)
            for group in work.groups:
                assert (group.slot, group.position, group.size >= 1) == (s, place, True)
                for k in range(group.size):
                    row, alpha, blend = next(entries)
                    entry, part = next(met_parts)
                    assert Met(group.form, part, alpha, Blend(blend)) == met[row]
                    isolated = int(rows.fork[row]) if rows.isolates else NO_ROW
                    first = min(r for r, found in met.items() if found.part == part)
                    learns_here = row == first if isolated == NO_ROW else isolated == s and place == 0
                    assert learns_here == (k < group.live)
                    if learns_here:
                        assert next(learns) == entry
                        assert next(live_members) == rows.member[row]
                        assert next(live_slots) == (NO_ROW if place else s)
            assert next(entries, None) is None
            assert work.blends == {found.blend for found in met.values()}
            same = len(names) == 1 and work.rows.tolist() == list(range(work.after))
            assert work.whole == (place > 0 and same and work.blends == {Blend.ADD})
    assert next(learns, None) is next(met_parts, None) is None
    assert len(plan.learning_entry) == len(plan.live)


@settings(max_examples=50, deadline=None)
@given(grown_crowds())
def test_plans_meet_every_part_in_its_group(grown: tuple[list[list[SlotRecord]], Chains]) -> None:
    crowd, folded = grown
    view = view_of(crowd, folded)
    trained = training_rows(view)
    plan = PlanSpec(trained, view).pack().to(CPU)
    check_plan(plan, trained, crowd, folded)
    assert len(set(plan.live.tolist())) == len(plan.live)  # a part learns in one row
    measured = measurement_rows(view)
    check_plan(PlanSpec(measured, view).pack().to(CPU), measured, crowd, folded)


Heard = tuple[int, int, int, int, int, int, float, int, bool]


def heard_in(plan: Plan, row_of: list[int], blank: int) -> set[Heard]:
    """Every entry that is heard: where, of which form, row, source and part, how, and whether it learns.

    row_of: the number of each row before it was laid out, NO_ROW of a spare one
    """
    learning = {
        e for e, part in zip(plan.learning_entry.tolist(), plan.live.tolist(), strict=True) if part != blank
    }
    parts, found = enumerate(plan.live[plan.live_index].tolist()), set()
    for work in (work for slot in plan.stations for work in slot):
        forms = [group.form for group in work.groups for _ in range(group.size)]
        for k, form in enumerate(forms):
            entry, part = next(parts)
            row, alpha = int(work.rows[k]), float(work.alpha[k])
            if alpha > 0:
                assert int(work.entry[row]) == k
                rows = row_of[row], row_of[int(work.source[k])]
                blend = int(work.blend[k])
                found.add((work.slot, work.position, form, *rows, part, alpha, blend, entry in learning))
            assert row_of[row] != NO_ROW or alpha == 0
    return found


def check_order(plan: Plan, blank: int) -> None:
    """Check that where no part runs again, held fixed, each entry has the number of its live part."""
    if any(group.live < group.size for group in plan.groups):
        return
    assert len(plan.live_index) <= len(plan.live)
    for number, (entry, part) in enumerate(
        zip(plan.learning_entry.tolist(), plan.live.tolist(), strict=True)
    ):
        if part != blank:
            assert entry == number == int(plan.live_index[entry])


@settings(max_examples=50, deadline=None)
@given(grown_crowds(), st.booleans())
def test_a_padded_plan_is_the_same_plan(grown: tuple[list[list[SlotRecord]], Chains], trains: bool) -> None:
    view = view_of(*grown)
    rows = training_rows(view) if trains else measurement_rows(view)
    blank = view.form.size
    spec = PlanSpec(replace(rows, tables=(np.arange(len(rows.member)),)), view, blank)
    tight, bucket = spec.pack().to(CPU), spec.need.with_margin()
    for _ in range(2):  # the layout of a bucket is kept for the next plan
        roomy = spec.pack(bucket).to(CPU)
        place = roomy.tables[0].tolist()  # of each row
        row_of = [NO_ROW] * roomy.num_rows
        for number, at in enumerate(place):
            row_of[at] = number
        assert roomy.members[place].tolist() == rows.member.tolist()
        assert heard_in(roomy, row_of, blank) == heard_in(tight, list(range(tight.num_rows)), blank)
        for plan in (tight, roomy):
            check_order(plan, blank)
        seated = roomy.seed_of_slot >= 0
        assert torch.equal(seated, tight.seed_of_slot >= 0)
        assert torch.equal(roomy.live[roomy.seed_of_slot[seated]], tight.live[tight.seed_of_slot[seated]])
        assert torch.equal(
            roomy.learning[roomy.seed_of_slot[seated]], tight.learning[tight.seed_of_slot[seated]]
        )
        for wide, exact in zip(roomy.stations, tight.stations, strict=True):
            bases = [{row_of[r]: row_of[int(b)] for r, b in enumerate(work.base)} for work in wide]
            for work, base in zip(exact, bases, strict=True):
                assert [base[r] for r in range(work.after)] == work.base.tolist()
