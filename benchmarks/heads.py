"""Eight masked heads: sample, log-prob and entropy at once, against a list of Categoricals."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Categorical

from benchmarks.common import Case, Work
from esper.lifecycle.actions import NUM_HEADS, head_sizes
from esper.tamiyo.policy.distribution import MaskedHeads
from esper.tamiyo.policy.flat import padded_choices


def list_of_categoricals(logits: list[Tensor], legal: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What most libraries do with several heads."""
    answers = []
    for head_logits, head_legal in zip(logits, legal, strict=True):
        head = Categorical(logits=head_logits.masked_fill(~head_legal, -1e8))
        action = head.sample()
        answers.append((action, head.log_prob(action), head.entropy()))
    return answers


def prepare(members: int, slots: int) -> Case:
    sizes = head_sizes(slots)
    open_choices = padded_choices(sizes).expand(members, -1, -1)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(open_choices.shape, generator=generator)
    legal = open_choices & (torch.rand(open_choices.shape, generator=generator) < 0.7)
    legal[..., 0] = True
    uniforms = torch.rand(members, NUM_HEADS, generator=generator)
    relevant = torch.ones(members, NUM_HEADS, dtype=torch.bool)
    by_head = [logits[:, h, :size] for h, size in enumerate(sizes)]
    legal_by_head = [legal[:, h, :size] for h, size in enumerate(sizes)]

    def ours() -> object:
        heads = MaskedHeads(logits, legal)
        return heads.evaluate(heads.sample(uniforms), relevant)

    return Case(ours=ours, baseline=lambda: list_of_categoricals(by_head, legal_by_head))


WORKS = (Work("heads", "sample, log-prob and entropy of eight masked heads", prepare, slots=(3, 25)),)
