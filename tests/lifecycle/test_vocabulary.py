"""Stages, actions and slot ids: the tables agree with the rules and refuse what they do not know."""

from __future__ import annotations

import pytest
import torch

from esper.lifecycle.actions import (
    HEAD_CHOICES,
    HEADS_READ,
    SPEED_TICKS,
    STYLE_BLEND,
    STYLE_CURVE,
    TARGET_ALPHA,
    TEMPO_TICKS,
    Actions,
    Head,
    Op,
    Style,
    head_sizes,
    relevance,
    selectable_blueprints,
)
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.slot_states import SlotConfig, SlotRecord, SlotStates
from esper.lifecycle.stages import (
    ADVANCEABLE_STAGES,
    COOLDOWN_STAGES,
    FOSSILIZABLE_STAGES,
    GERMINATION_BLOCKERS,
    NEXT_STAGE,
    PRUNABLE_STAGES,
    TRANSITIONS,
    Stage,
    check_stage,
)
from esper.tamiyo.policy.action_masks import SlotMaskState


def test_stage_values() -> None:
    assert [int(s) for s in Stage] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]


def test_sets_of_stages_follow_from_the_table_of_moves() -> None:
    names = {s.name for s in PRUNABLE_STAGES}
    assert names == {"GERMINATED", "TRAINING", "BLENDING", "HOLDING"}
    assert {Stage.HOLDING} == FOSSILIZABLE_STAGES
    assert {Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING} == ADVANCEABLE_STAGES
    assert all(after in TRANSITIONS[stage] for stage, after in NEXT_STAGE.items())
    assert all(len(TRANSITIONS[stage]) == 1 for stage in COOLDOWN_STAGES)
    assert {s.name for s in GERMINATION_BLOCKERS} == {
        "GERMINATED", "TRAINING", "PRUNED", "EMBARGOED", "RESETTING",
    }  # fmt: skip


@pytest.mark.parametrize("value", [5, 11, 99, -1])
def test_unknown_stages_are_refused_at_every_entrance(value: int) -> None:
    doors = {
        "check_stage": lambda: check_stage(value),
        "SlotRecord": lambda: SlotRecord(stage=value),
        "SlotMaskState": lambda: SlotMaskState(stage=value),
        "SlotStates": lambda: SlotStates.empty(2, 2).replace(stage=torch.full((2, 2), value)).check(),
    }
    for door in doors.values():
        with pytest.raises(ValueError, match=rf"is {value}; allowed are UNKNOWN 0, .* \(5 is retired\)"):
            door()


def test_relevance_is_the_table_of_the_rules() -> None:
    #            slot bp style tempo target speed curve op
    expected = {
        Op.WAIT: [0, 0, 0, 0, 0, 0, 0, 1],
        Op.GERMINATE: [1, 1, 1, 1, 1, 0, 0, 1],
        Op.SET_ALPHA_TARGET: [1, 0, 1, 0, 1, 1, 1, 1],
        Op.PRUNE: [1, 0, 0, 0, 0, 1, 1, 1],
        Op.FOSSILIZE: [1, 0, 0, 0, 0, 0, 0, 1],
        Op.ADVANCE: [1, 0, 0, 0, 0, 0, 0, 1],
    }
    assert relevance(torch.tensor(list(Op))).int().tolist() == [expected[op] for op in Op]
    assert set(HEADS_READ) == set(Op)


def test_choices_of_the_heads() -> None:
    assert head_sizes(7) == (7, 16, 4, 3, 3, 4, 5, 6)
    assert [h.name for h in Head] == [
        "SLOT", "BLUEPRINT", "STYLE", "TEMPO", "ALPHA_TARGET", "ALPHA_SPEED", "ALPHA_CURVE", "OP",
    ]  # fmt: skip
    assert list(TEMPO_TICKS.values()) == [3, 5, 8]
    assert list(SPEED_TICKS.values()) == [0, 3, 5, 8]
    assert list(TARGET_ALPHA.values()) == [0.5, 0.7, 1.0]
    for table, choices in (
        (STYLE_BLEND, Style),
        (STYLE_CURVE, Style),
        (HEAD_CHOICES, set(Head) - {Head.SLOT}),
    ):
        assert set(table) == set(choices)
    for table in (TEMPO_TICKS, SPEED_TICKS, TARGET_ALPHA, STYLE_BLEND, STYLE_CURVE):
        assert list(table) == sorted(table), "tables are indexed by choice"


def test_blueprints_by_topology() -> None:
    assert {int(b) for b in selectable_blueprints("cnn")} == {1, 2, 3, 4, 5, 6, 7}
    assert {int(b) for b in selectable_blueprints("transformer")} == {2, 3, 8, 9, 10, 11, 12}
    assert 0 not in selectable_blueprints("mlp")
    with pytest.raises(ValueError, match="topology is 'rnn'; allowed are cnn, transformer, mlp"):
        selectable_blueprints("rnn")


def test_actions_check_their_shape() -> None:
    assert Actions.wait(3)[Head.OP].tolist() == [0, 0, 0]
    assert Actions.of([{Head.OP: Op.PRUNE, Head.SLOT: 2}]).choices.tolist() == [[2, 0, 0, 0, 0, 0, 0, 3]]
    assert len(Actions.of([])) == 0
    for shape in ((3,), (3, 7), (2, 3, 8)):
        with pytest.raises(ValueError, match=r"expected \[members, 8\]"):
            Actions(torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match=r"actions are of torch.float32; expected torch.int64"):
        Actions(torch.zeros(3, 8))


def test_slot_config_orders_and_validates() -> None:
    assert SlotConfig.grid(2, 2).slot_ids == ("r0c0", "r0c1", "r1c0", "r1c1")
    assert SlotConfig(("r3c1", "r0c0")).num_slots == 2
    for ids, message in (
        ((), "empty"),
        (("a",), "slot id is 'a'"),
        (("r0c0", "r0c0"), "more than once: r0c0"),
    ):
        with pytest.raises(ValueError, match=message):
            SlotConfig(ids)
    with pytest.raises(ValueError, match="a grid of 0 x 3 has no slots"):
        SlotConfig.grid(0, 3)


def test_config_defaults_are_the_rules_and_bad_values_name_their_key() -> None:
    config = LifecycleConfig()
    assert (config.max_seeds, config.min_prune_age, config.embargo_ticks, config.resetting_ticks) == (
        0,
        5,
        5,
        1,
    )
    gates = config.gates
    assert (gates.mode, gates.training_epochs, gates.min_health) == ("permissive", 10, 0.7)
    assert (gates.min_shadow_gain, gates.min_gradient_ratio, gates.min_contribution) == (0.5, 0.1, 1.0)
    bad = (
        ({"max_seed": 3}, "max_seed"),
        ({"max_seeds": -1}, "max_seeds"),
        ({"embargo_ticks": "x"}, "embargo_ticks"),
    )
    for values, key in bad:
        with pytest.raises(ValueError, match=key):
            LifecycleConfig(**values)
    with pytest.raises(ValueError, match="mode"):
        GateConfig(mode="lax")  # type: ignore[arg-type]
