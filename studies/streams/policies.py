"""What sets the rate: plans that look at nothing, plans that know the shifts, a rule and a predictor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from studies.streams.data import MOST_SHIFTS, Bank, Floats
from studies.streams.networks import Policy, Seen, train

Settings = tuple[float, ...]
EVERY = 6  # minibatches between decisions
RATES = tuple(0.00125 * 2.0**k for k in range(9))
STARTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the stream at which the usual decay begins; 1: never
FORMS = ("constant", "root", "linear", "late")  # of the rate between two shifts
RESPONSES = ("none", "reset the optimizer", "and restart the last layer")
FIXED = tuple(itertools.product(RATES, STARTS))  # rates, and where their decay begins
MOST_ROWS = 4096  # networks that train at once


def in_parts(bank: Bank, plans: Tensor, policy: Callable[[Bank, Tensor], Policy]) -> Tensor:
    """Train an arm for each of the plans [A, ...], not all at once.  # → [A, rows, 2]"""
    parts = plans.split(max(1, MOST_ROWS // bank.rows))
    return torch.cat([train(bank, policy(bank, part), len(part)) for part in parts])


def mean_score(parts: Sequence[Tensor]) -> Floats:
    """Return the mean score of each arm over all networks.  # [A, rows, 2] for each bank → [A]"""
    return torch.cat(list(parts), dim=1).mean(dim=(1, 2)).double().numpy()


def fixed_policy(bank: Bank, plans: Tensor) -> Policy:
    """Fall linearly from a rate to 0 from a share of the stream on.  # plans [A, 2] or [A, rows, 2]"""
    rate, start = (plans if plans.ndim == 3 else plans[:, None].expand(-1, bank.rows, -1)).flatten(0, 1).T
    left = 1.0 - torch.arange(bank.length) / bank.length
    rates = rate[:, None] * (left / (1.0 - start[:, None]).clamp(min=1e-6)).clamp(max=1.0)
    still = torch.zeros(len(rates), dtype=torch.long)
    return lambda step, seen: (rates[:, step], still)


def segment_policy(bank: Bank, plans: Tensor) -> Policy:
    """Follow plans that know the shifts: a rate, a form and a response for each segment.

    plans [A, rows, MOST_SHIFTS + 1, 3]: indices into RATES, FORMS and RESPONSES
    """
    index = bank.segment[None, :, :, None].expand(len(plans), -1, -1, 3)
    peak, form, response = plans.gather(2, index).flatten(0, 1).unbind(2)  # [A * rows, length] each
    age, span = bank.age.repeat(len(plans), 1), bank.span.repeat(len(plans), 1)
    left = 1 - age / span
    forms = torch.stack([torch.ones(age.shape), (1 + age / 8) ** -0.5, left, (2 * left).clamp(max=1.0)])
    rates = torch.tensor(RATES)[peak] * forms.gather(0, form[None])[0]
    responses = response * ((age == 0) & (bank.segment > 0).repeat(len(plans), 1))
    return lambda step, seen: (rates[:, step], responses[:, step])


def oracle_plans(bank: Bank, settings: Settings) -> Tensor:
    """Return what the oracle does that is told all shifts: one response for each third of the severities.

    settings: rate and form of the first segment, then rate, form and response for small, middle and large
    shifts.  # → [rows, MOST_SHIFTS + 1, 3]
    """
    given = torch.tensor([*settings[:2], 0, *settings[2:]], dtype=torch.long).view(4, 3)
    thirds = torch.zeros(len(bank.streams), MOST_SHIFTS + 1, dtype=torch.long)
    for k, stream in enumerate(bank.streams):
        for index, (_, _, severity) in enumerate(stream.shifts, start=1):
            thirds[k, index] = 1 + min(2, int((severity - 0.1) / 0.3))
    return given[thirds[bank.stream_of]]


def known_facts(bank: Bank) -> Floats:
    """Return what is known beforehand: length, features and classes.  # [streams, 3]"""
    return np.array([[np.log(bank.length), stream.features, stream.classes] for stream in bank.streams])


def hindsight(bank: Bank, start: Settings, rounds: int, tries: int) -> Tensor:
    """Search the best plan of each stream with each half of its twins; score it by the other half.

    start: the oracle's settings, the first plan. Returns honest scores, and those that the searching half had
    itself.  # → [2, rows, 2]
    """
    draw = torch.Generator().manual_seed(bank.length)
    count, half = len(bank.streams), bank.twins // 2
    segments = torch.tensor([len(stream.shifts) + 1 for stream in bank.streams])[:, None, None]

    sizes = torch.tensor([len(RATES), len(FORMS), len(RESPONSES)])

    def spread(plans: Tensor) -> Tensor:  # [A, count, 2, S, 3] → [A, rows, S, 3]
        return plans.repeat_interleave(half, dim=2).flatten(1, 2)

    uniform = torch.cartesian_prod(torch.arange(len(RATES)), torch.arange(len(FORMS)), torch.arange(1))
    plans = uniform[:, None, None, None].repeat(1, count, 2, MOST_SHIFTS + 1, 1)
    first = oracle_plans(bank, start)[:: bank.twins, None].expand(-1, 2, -1, -1)
    plans, best, value = torch.cat([first[None], plans]), first.clone(), torch.full((count, 2), -math.inf)
    for _ in range(rounds + 1):
        found = in_parts(bank, spread(plans), segment_policy).mean(2).view(len(plans), count, 2, half).mean(3)
        top, which = found.max(dim=0)
        chosen = plans.gather(0, which[None, :, :, None, None].expand(1, -1, -1, *plans.shape[3:]))[0]
        best = torch.where((top > value)[..., None, None], chosen, best)
        value = value.maximum(top)
        plans = best.repeat(tries, 1, 1, 1, 1)
        for change in range(2):  # one or two entries of the plan are drawn anew
            shape = tries, count, 2
            where = (torch.rand(shape, generator=draw) * segments[None, ..., 0]).long()
            entry = torch.randint(3, shape, generator=draw)
            index = torch.zeros_like(plans, dtype=torch.bool)
            index.view(*shape, -1).scatter_(3, (3 * where + entry)[..., None], True)
            index &= ((torch.rand(shape, generator=draw) < 0.5) | (change == 0))[..., None, None]
            near = (plans + torch.randint(-2, 3, plans.shape, generator=draw)).clamp(0, len(RATES) - 1)
            drawn = (torch.rand(plans.shape, generator=draw) * sizes).long()
            plans = torch.where(index, torch.where(sizes == len(RATES), near, drawn), plans)
    both = torch.stack([best.flip(1), best])
    return in_parts(bank, spread(both), segment_policy)


# ---- policies that read the stream -------------------------------------------------------------------------

ACTIONS = ("follow the rule", "keep", "×2", "÷2", "start or stop the fall", *RESPONSES[1:])
# The factor of the rate, whether the fall starts or stops, the response. After ACTIONS: two changes at once.
CHANGES = torch.tensor([
    (1, 0, 0), (1, 0, 0), (2, 0, 0), (0.5, 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 2),
    (4, 0, 0), (0.25, 0, 0), (2, 0, 1), (2, 0, 2), (4, 0, 2), (1, 1, 2), (4, 1, 2),
])  # fmt: skip
RULE_GRIDS: tuple[Settings, ...] = (
    (0.02, 0.05, 0.1, 0.2, 0.4, 0.8),  # the rise of the loss that is taken for a shift
    (6, 12, 24, 48, 96, 192, 1e9),  # minibatches in which the rate halves
    RATES,  # the first rate, which a raise never exceeds
    (2, 4, 16),  # by how much a shift raises it
    (0, 1, 2),  # the response to a shift
    (1e-6, 0.1, 0.25, 0.5),  # share of the stream in which the rate falls to 0
)
SINCE = 12  # the feature that is 0 where a response was given at the last decision
Ints = NDArray[np.int64]
Chooser = Callable[[Floats], Ints]  # features [N, ...] → actions [N]


class Controlled:
    """The reactive rule, and what a predictor does instead of it.

    settings [A, 6]: one of each grid. forced: for each row a minibatch and an action that is taken there
    whatever the predictor says. told: the rule is told each shift at the next decision and reads no loss.
    """

    def __init__(
        self,
        bank: Bank,
        settings: Tensor,
        chooser: Chooser | None = None,
        forced: tuple[Tensor, Tensor] | None = None,
        told: bool = False,
    ) -> None:
        self.bank, self.chooser, self.forced, arms = bank, chooser, forced, len(settings)
        # Minibatches after which a decision would see some of a new rule for the first time.
        self.shifted = ((bank.age < EVERY) & (bank.segment > 0)).repeat(arms, 1) if told else None
        columns = settings.float().repeat_interleave(bank.rows, dim=0).unbind(1)
        self.rise, self.half_life, self.first, self.factor, self.response, self.ending = columns
        self.rate, self.running = self.first.clone(), torch.zeros_like(self.first)
        self.since, self.falls = torch.zeros_like(self.first), torch.zeros_like(self.first, dtype=torch.bool)
        self.facts = torch.tensor(known_facts(bank)).float()[bank.stream_of].repeat(arms, 1)
        self.noted = torch.zeros(0)  # features of each row where its action was forced

    def __call__(self, step: int, seen: Seen) -> tuple[Tensor, Tensor]:
        responses = torch.zeros_like(self.rate, dtype=torch.long)
        if step and step % EVERY == 0:
            recent = seen.losses[:, step - EVERY : step].mean(1)
            before = torch.where(self.running > 0, self.running, recent)
            risen = recent > (1 + self.rise) * before
            if self.shifted is not None:
                risen = self.shifted[:, step - 1]
            higher = self.rate.maximum((self.rate * self.factor).minimum(self.first))
            by_rule = torch.where(risen, higher, self.rate * 2.0 ** (-EVERY / self.half_life))
            action = self._choose(step, seen, recent / before)
            factor, toggles, response = CHANGES[action].unbind(1)
            self.rate = torch.where(action == 0, by_rule, self.rate * factor).clamp(max=RATES[-2])
            self.falls ^= toggles > 0
            responses = torch.where(action == 0, self.response * risen, response).long()
            self.since = torch.where(responses > 0, 0.0, self.since + 1)
            # The running mean begins anew at a rise, so that one shift is answered once.
            self.running = torch.where(risen, recent, before.lerp(recent, 0.3))
        left = self.bank.length - step
        self.rate = torch.where(self.falls, self.rate * (left - 1) / left, self.rate)
        return self.rate * (left / (self.ending * self.bank.length)).clamp(max=1.0), responses

    def _choose(self, step: int, seen: Seen, ratio: Tensor) -> Tensor:
        """Return the actions of this decision.  # [N]"""
        action = torch.zeros(len(ratio), dtype=torch.long)
        if not self.chooser and not self.forced:
            return action
        features = self.features(step, seen, ratio)
        if self.chooser:
            action = torch.from_numpy(self.chooser(features.double().numpy()))
        if self.forced:
            here = self.forced[0] == step
            action = torch.where(here, self.forced[1], action)
            kept = self.noted if len(self.noted) else torch.zeros_like(features)
            self.noted = torch.where(here[:, None], features, kept)
        return action

    def features(self, step: int, seen: Seen, ratio: Tensor) -> Tensor:
        """Describe the stream so far, with what is known beforehand.  # → [N, ...]"""
        losses = seen.losses[:, :step] / self.facts[:, 2:].log()  # that of chance is 1
        means = torch.stack([losses[:, -k:].mean(1) for k in (2, EVERY, 12, 24, 48, 96)], 1).clamp(1e-3).log()
        usual = losses.unfold(1, EVERY, EVERY).mean(2).clamp(1e-3).log()  # [N, decisions so far]
        columns = [
            self.rate.log(), (self.rate / self.first).log(), self.falls.float(), self.since.log1p(),
            torch.full_like(self.rate, step / self.bank.length), ratio.log(), usual[:, -1] - usual.amin(1),
            usual[:, -1] - usual[:, -2:].amin(1), losses[:, -2 * EVERY :].std(1),
            *(seen.accuracies[:, max(0, step - k) : step].mean(1) for k in (EVERY, 24)),
        ]  # fmt: skip
        return torch.cat([self.facts, means, torch.stack(columns, 1)], dim=1)
