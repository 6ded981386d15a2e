"""Plans against loops over members and slots."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.actions import STYLE_BLEND, Style
from esper.lifecycle.slot_states import AlphaMode, SlotRecord, SlotStates
from esper.lifecycle.stages import HEARD_STAGES, SEED_STAGES, Stage
from esper.population.plan import (
    NO_ROW,
    Measurement,
    Plan,
    Rows,
    SlotView,
    build_plan,
    measurement_rows,
    training_rows,
)

CPU = torch.device("cpu")
STAGES = [stage for stage in Stage if stage is not Stage.UNKNOWN]
ALPHAS = [0.0, 0.25, 0.5, 1.0]


@st.composite
def records(draw: st.DrawFn) -> SlotRecord:
    stage = draw(st.sampled_from(STAGES))
    return SlotRecord(
        stage=stage,
        blueprint=draw(st.integers(1, 4)) if stage in SEED_STAGES else -1,
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
    return [r.alpha if r.stage in HEARD_STAGES else 0.0 for r in row]


def view_of(crowd: list[list[SlotRecord]]) -> SlotView:
    return SlotView.of(SlotStates.from_records(crowd))


def as_lists(rows: Rows) -> list[tuple[int, list[float], int]]:
    return list(zip(rows.member.tolist(), rows.alpha.tolist(), rows.shadow_slot.tolist(), strict=True))


@settings(max_examples=60, deadline=None)
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


def subset_row(found: Measurement, row: int) -> tuple[int, list[float]]:
    return int(found.rows.member[row]), found.rows.alpha[row].tolist()


@settings(max_examples=60, deadline=None)
@given(crowds(), st.booleans(), st.booleans())
def test_measurement_rows_equal_a_loop_and_no_subset_is_there_twice(
    crowd: list[list[SlotRecord]], ablate: bool, pairs: bool
) -> None:
    found = measurement_rows(view_of(crowd), ablate, pairs)
    subsets: set[tuple[int, tuple[float, ...]]] = set()
    for i, row in enumerate(crowd):
        own = heard_alphas(row)
        assert subset_row(found, i) == (i, own)
        subsets.add((i, tuple(own)))
        for s, r in enumerate(row):
            asked = {
                "without": (own[s] > 0, [0.0 if k == s else a for k, a in enumerate(own)]),
                "shadow": (r.stage == Stage.TRAINING, [1.0 if k == s else a for k, a in enumerate(own)]),
            }
            for name, (wanted, alphas) in asked.items():
                place = int(getattr(found, name)[i, s])
                if wanted and ablate:
                    assert subset_row(found, place) == (i, alphas)
                    subsets.add((i, tuple(alphas)))
                else:
                    assert place == NO_ROW
            assert found.without_pair[i, s, s] == NO_ROW
        for s, t in combinations(range(len(row)), 2):
            place = int(found.without_pair[i, s, t])
            assert place == int(found.without_pair[i, t, s])
            if own[s] > 0 and own[t] > 0 and ablate and pairs:
                alphas = [0.0 if k in (s, t) else a for k, a in enumerate(own)]
                assert subset_row(found, place) == (i, alphas)
                subsets.add((i, tuple(alphas)))
            else:
                assert place == NO_ROW
    assert len(found.rows.member) == len(subsets)  # each distinct subset once
    assert (found.rows.shadow_slot == NO_ROW).all()


def fork_of(rows: Rows, row: int) -> int:
    """The first slot where a row's alphas differ from those of its member's own row, −1 for none."""
    own = rows.alpha[rows.member[row]]
    return next((s for s, a in enumerate(rows.alpha[row]) if a != own[s]), NO_ROW)


def check_forks(plan: Plan, rows: Rows) -> None:
    """Rows come in the order of their forks; each continues its member's row there and its own after."""
    forks = [fork_of(rows, r) for r in range(len(rows.member))]
    assert rows.fork.tolist() == forks == sorted(forks)
    for s, work in enumerate(plan.slots):
        assert work.before == sum(f < s for f in forks)
        assert work.after == len(work.base) == len(work.entry) == sum(f <= s for f in forks)
        came_from = [int(rows.member[r]) if forks[r] == s else r for r in range(work.after)]
        assert work.base.tolist() == came_from
        assert work.source.tolist() == [came_from[r] for r in work.rows.tolist()]


def check_plan(plan: Plan, rows: Rows, crowd: list[list[SlotRecord]]) -> None:
    num_slots = len(crowd[0])
    check_forks(plan, rows)
    learns = iter(plan.learns.tolist())
    met_seeds = enumerate(plan.live_seeds[plan.seed].tolist())
    assert plan.members.tolist() == rows.member.tolist()
    assert plan.own == len(crowd)
    for s, work in enumerate(plan.slots):
        entries = zip(work.rows.tolist(), work.alpha.tolist(), strict=True)
        met = [r for r in range(work.after) if rows.alpha[r, s] > 0]
        assert sorted(work.rows.tolist()) == met
        for r in range(work.after):
            place = int(work.entry[r])
            assert (place == NO_ROW) == (r not in met)
            assert place == NO_ROW or int(work.rows[place]) == r
        names = [group.blueprint for group in work.groups]
        assert names == sorted(set(names))
        blends = []
        for group in work.groups:
            assert (group.slot, group.size >= 1) == (s, True)
            for k in range(group.size):
                row, alpha = next(entries)
                member = int(rows.member[row])
                seed = crowd[member][s]
                learns_here = rows.shadow_slot[row] in (NO_ROW, s)
                assert learns_here == (k < group.live)
                assert seed.blueprint == group.blueprint
                assert alpha == rows.alpha[row, s]
                entry, met_seed = next(met_seeds)
                assert met_seed == member * num_slots + s
                if learns_here:
                    assert next(learns) == entry
                blends.append(STYLE_BLEND[Style(seed.style)])
        assert work.blend.tolist() == [int(b) for b in blends]
        assert work.blends == frozenset(blends)
        assert next(entries, None) is None
    assert next(learns, None) is next(met_seeds, None) is None
    assert len(plan.learns) == len(plan.live_seeds)


@settings(max_examples=60, deadline=None)
@given(crowds())
def test_plans_meet_every_seed_in_its_group(crowd: list[list[SlotRecord]]) -> None:
    view = view_of(crowd)
    trained = training_rows(view)
    plan = build_plan(trained, view, CPU)
    check_plan(plan, trained, crowd)
    assert len(set(plan.live_seeds.tolist())) == len(plan.live_seeds)  # a seed learns in one row
    measured = measurement_rows(view, True, True).rows
    check_plan(build_plan(measured, view, CPU), measured, crowd)


@settings(max_examples=30, deadline=None)
@given(crowds())
def test_a_view_says_what_the_records_say(crowd: list[list[SlotRecord]]) -> None:
    view = view_of(crowd)
    assert view.alpha.tolist() == [heard_alphas(row) for row in crowd]
    assert view.frozen.tolist() == [[r.alpha_mode == AlphaMode.DOWN for r in row] for row in crowd]
    assert view.training.tolist() == [[r.stage == Stage.TRAINING for r in row] for row in crowd]
    last = view.members(len(crowd) - 1, len(crowd))
    assert last.shape == (1, len(crowd[0]))
    assert np.array_equal(last.blueprint[0], [r.blueprint for r in crowd[-1]])
