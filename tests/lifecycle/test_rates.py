"""The rules of the learning rate against a slow reference that looks at one member at a time."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.actions import Rate
from esper.lifecycle.rates import LEAST_SCALE, MOST_SCALE, Rates, change_rates, legal_rates

SCALES = st.sampled_from([LEAST_SCALE, 1.5 * LEAST_SCALE, 0.1, 1.0, 3.0, MOST_SCALE / 2, MOST_SCALE])
SHARES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
MEMBERS = st.lists(
    st.tuples(SCALES, st.one_of(SHARES, st.just(math.inf)), SHARES, st.integers(-2, 5)),
    min_size=1,
    max_size=9,
)


def slow(scale: float, decay_at: float, spent: float, choice: int) -> tuple[list[bool], float, float]:
    """What is legal for one member, and its rate after one choice."""
    legal = [True, False, False, False]
    if spent < decay_at:
        legal = [True, 2 * scale <= MOST_SCALE, scale / 2 >= LEAST_SCALE, True]
    if 0 <= choice < len(Rate) and legal[choice]:
        if choice == Rate.DOUBLE:
            scale *= 2
        elif choice == Rate.HALVE:
            scale /= 2
        elif choice == Rate.DECAY:
            decay_at = spent
    return legal, scale, decay_at


@settings(deadline=None)
@given(MEMBERS)
def test_mask_and_executor_follow_the_reference(members: list[tuple[float, float, float, int]]) -> None:
    scale, decay_at, spent = (torch.tensor([member[k] for member in members]) for k in range(3))
    rates, choice = Rates(scale, decay_at), torch.tensor([member[3] for member in members])
    stored = zip(scale.tolist(), decay_at.tolist(), spent.tolist(), choice.tolist(), strict=True)
    expected = [slow(*member) for member in stored]
    after = change_rates(rates, choice, spent.double())
    assert legal_rates(rates, spent.double()).tolist() == [legal for legal, _, _ in expected]
    assert after.scale.tolist() == [changed for _, changed, _ in expected]
    assert after.decay_at.tolist() == [begun for _, _, begun in expected]
    assert after.scale.dtype == after.decay_at.dtype == torch.float32
