"""The alpha controller against formulas written out."""

from __future__ import annotations

import pytest
import torch

from esper.lifecycle.actions import AlphaCurve
from esper.lifecycle.engine import advance_alpha, ease, retarget
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from tests.lifecycle import reference as ref


def ramp(start: float, target: float, ticks: int, curve: int) -> SlotStates:
    states = SlotStates.empty(1, 1).replace(alpha=torch.full((1, 1), start))
    everywhere = torch.ones(1, 1, dtype=torch.bool)
    return retarget(
        states, everywhere, torch.tensor([[target]]), torch.tensor([[ticks]]), torch.tensor([[curve]])
    )


@pytest.mark.parametrize("curve", list(AlphaCurve))
def test_curves_are_the_formulas_and_meet_their_ends(curve: AlphaCurve) -> None:
    t = torch.linspace(0, 1, 41)
    eased = ease(torch.full((41,), int(curve)), t)
    expected = torch.tensor([ref.ease(int(curve), x) for x in t.tolist()])
    torch.testing.assert_close(eased, expected, atol=1e-6, rtol=0)
    assert eased[0].item() == pytest.approx(0, abs=1e-7)
    assert eased[-1].item() == pytest.approx(1, abs=1e-7)
    assert bool((eased.diff() >= 0).all())


@pytest.mark.parametrize("curve", list(AlphaCurve))
@pytest.mark.parametrize(("start", "target"), [(0.0, 1.0), (0.0, 0.7), (1.0, 0.5), (0.7, 0.0), (0.15, 0.7)])
def test_a_ramp_follows_its_curve_and_ends_exactly(curve: AlphaCurve, start: float, target: float) -> None:
    states = ramp(start, target, 5, int(curve))
    mode = AlphaMode.UP if target > start else AlphaMode.DOWN
    for done in range(1, 5):
        assert states.alpha_mode.item() == mode
        states = advance_alpha(states)
        assert states.alpha.item() == pytest.approx(
            start + (target - start) * ref.ease(curve, done / 5), abs=1e-6
        )
    states = advance_alpha(states)
    assert torch.equal(states.alpha, torch.tensor([[target]]))
    assert states.alpha_mode.item() == AlphaMode.HOLD
    rest = advance_alpha(states)
    assert all(torch.equal(value, rest.tensors()[name]) for name, value in states.tensors().items())


def test_no_ticks_snap_and_no_way_to_go_rests() -> None:
    snapped = ramp(0.0, 0.7, 0, AlphaCurve.SIGMOID)
    assert snapped.alpha.item() == pytest.approx(0.7)
    assert (snapped.alpha_mode.item(), snapped.alpha_steps_total.item()) == (AlphaMode.HOLD, 0)
    still = ramp(1.0, 1.0, 8, AlphaCurve.LINEAR)
    assert (still.alpha.item(), still.alpha_mode.item(), still.alpha_steps_total.item()) == (
        1.0,
        AlphaMode.HOLD,
        0,
    )


def test_retarget_touches_only_where_told() -> None:
    states = SlotStates.empty(2, 2)
    where = torch.tensor([[True, False], [False, False]])
    after = retarget(states, where, torch.tensor([[1.0]]), torch.tensor([[3]]), torch.tensor([[1]]))
    for name, value in after.tensors().items():
        assert torch.equal(value[~where], states.tensors()[name][~where]), name
    assert after.alpha_mode[0, 0].item() == AlphaMode.UP
