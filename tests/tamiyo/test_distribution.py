"""The masked distribution, against torch's Categorical and against plain arithmetic."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical

from esper.tamiyo.policy.distribution import MaskedHeads

ROWS, HEADS, CHOICES = 7, 8, 13
LARGEST_UNIFORM = 1 - 2.0**-24  # the largest float32 below 1


def random_heads(seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor, MaskedHeads]:
    """Random logits, masks with at least one legal choice, and their distribution."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, HEADS, CHOICES, generator=generator) * scale
    legal = torch.rand(ROWS, HEADS, CHOICES, generator=generator) < 0.4
    sure = torch.randint(CHOICES, (ROWS, HEADS, 1), generator=generator)
    legal = legal.scatter(-1, sure, True)
    return logits, legal, MaskedHeads(logits, legal)


def everything_relevant(actions: Tensor) -> Tensor:
    return torch.ones_like(actions, dtype=torch.bool)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.01, 1.0, 30.0]))
def test_log_probs_and_entropy_are_those_of_a_categorical_over_the_legal_choices(
    seed: int, scale: float
) -> None:
    logits, legal, heads = random_heads(seed, scale)
    actions = heads.sample(torch.rand(ROWS, HEADS, generator=torch.Generator().manual_seed(seed)))
    judged = heads.evaluate(actions, everything_relevant(actions))
    for row in range(ROWS):
        for head in range(HEADS):
            choices = legal[row, head].nonzero().flatten()
            reference = Categorical(logits=logits[row, head, choices].double())
            chosen = (choices == actions[row, head]).nonzero().flatten()
            assert chosen.numel() == 1
            expected = reference.log_prob(chosen[0])
            torch.testing.assert_close(judged.log_prob[row, head].double(), expected, atol=1e-5, rtol=1e-5)
            nats = (
                reference.entropy() / max(math.log(len(choices)), 1e-12)
                if len(choices) > 1
                else torch.tensor(0.0)
            )
            torch.testing.assert_close(
                judged.entropy[row, head].double(), nats.double(), atol=1e-5, rtol=1e-5
            )


def test_gradients_stay_alive_when_one_action_dominates() -> None:
    for action in range(4):
        logits = torch.tensor([[[14.0, 0.0, 0.0, 0.0]]], requires_grad=True)
        heads = MaskedHeads(logits, torch.ones(1, 1, 4, dtype=torch.bool))
        judged = heads.evaluate(torch.tensor([[action]]), torch.ones(1, 1, dtype=torch.bool))
        (log_prob_grad,) = torch.autograd.grad(judged.log_prob.sum(), logits, retain_graph=True)
        (entropy_grad,) = torch.autograd.grad(judged.entropy.sum(), logits)
        for gradient in (log_prob_grad, entropy_grad):
            assert gradient.isfinite().all()
            assert gradient.abs().min() > 0.0


def test_sampled_frequencies_match_the_log_probs_that_are_stored() -> None:
    logits, legal, heads = random_heads(11)
    draws = 4_000
    many = MaskedHeads(logits.expand(draws, *logits.shape), legal.expand(draws, *legal.shape))
    actions = many.sample(torch.rand(draws, ROWS, HEADS, generator=torch.Generator().manual_seed(1)))
    frequency = torch.nn.functional.one_hot(actions, CHOICES).float().mean(0)
    spread = (heads.probs * (1 - heads.probs) / draws).sqrt()
    assert ((frequency - heads.probs).abs() <= 5 * spread + 1e-6).all()
    stored = many.evaluate(actions, everything_relevant(actions)).log_prob
    torch.testing.assert_close(stored.exp(), many.probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    uniform=st.sampled_from([0.0, 2.0**-24, 0.5, 1 - 2.0**-20, LARGEST_UNIFORM]),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
)
def test_no_uniform_ever_samples_an_illegal_action(seed: int, uniform: float, scale: float) -> None:
    _, legal, heads = random_heads(seed, scale)
    actions = heads.sample(torch.full((ROWS, HEADS), uniform))
    assert legal.gather(-1, actions.unsqueeze(-1)).all()


def test_rounding_of_the_cumulated_probabilities_never_leaves_the_legal_set() -> None:
    """Thirds and sevenths do not add up to 1 in float32; padding stands behind the last legal choice."""
    for count in range(1, 26):
        legal = torch.zeros(1, 1, 26, dtype=torch.bool)
        legal[..., :count] = True
        for logits in (torch.zeros(1, 1, 26), torch.linspace(-9, 9, 26).view(1, 1, 26)):
            heads = MaskedHeads(logits, legal)
            for uniform in (LARGEST_UNIFORM, 1.0):  # 1.0 is outside the contract and still safe
                assert heads.sample(torch.full((1, 1), uniform)).item() < count
        not_a_number = MaskedHeads(torch.full((1, 1, 26), float("nan")), legal)
        assert not_a_number.sample(torch.full((1, 1), 0.5)).item() < count


def test_a_head_that_is_not_read_has_log_prob_0_and_entropy_0_and_no_gradient() -> None:
    logits, legal, _ = random_heads(2)
    logits.requires_grad_()
    heads = MaskedHeads(logits, legal)
    relevant = torch.zeros(ROWS, HEADS, dtype=torch.bool)
    relevant[:, -1] = True
    judged = heads.evaluate(heads.mode() * relevant, relevant)
    assert (judged.log_prob[:, :-1] == 0).all()
    assert (judged.entropy[:, :-1] == 0).all()
    (judged.log_prob.sum() + judged.entropy.sum()).backward()
    assert logits.grad is not None
    assert (logits.grad[:, :-1] == 0).all()
    assert (logits.grad[:, -1] != 0).any()


def test_an_all_masked_row_is_a_fault_where_it_is_read() -> None:
    logits, legal, _ = random_heads(4)
    legal[3, 1] = False
    heads = MaskedHeads(logits, legal)
    actions = heads.sample(torch.rand(ROWS, HEADS))
    assert actions[3, 1] == 0
    judged = heads.evaluate(actions, everything_relevant(actions))
    assert judged.log_prob.isfinite().all()
    assert judged.entropy.isfinite().all()
    assert judged.fault[3, 1]
    assert (judged.fault != 0).sum() == 1
    unread = torch.ones(ROWS, HEADS, dtype=torch.bool)
    unread[3, 1] = False
    assert not heads.evaluate(actions, unread).fault.any()


def test_a_given_action_that_the_mask_forbids_is_a_fault() -> None:
    _, legal, heads = random_heads(6)
    actions = heads.mode()
    actions[2, 5] = (~legal[2, 5]).nonzero()[0, 0]
    judged = heads.evaluate(actions, everything_relevant(actions))
    assert judged.fault[2, 5]
    assert judged.log_prob.isfinite().all()
