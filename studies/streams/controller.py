"""A recurrent controller for streams whose data shift, and its judgement beside opponents tuned again.

    python -m studies.streams.controller --out FILE --weights FILE     judge; extra rates
    python -m studies.streams.controller --read FILE                   the table, at once

Judging takes 17 minutes of one core. Weights that are not there are trained first, in 20 more.

Protocol, set before any judged stream was run. The streams to train on are drawn anew for every update, with
seeds from TRAINED on; updates and margin were chosen on streams from VALIDATED on; the figures are of streams
from JUDGED on, which chose nothing and were run once. The opponents of one run are tuned again on TUNED
streams of each length, and the rule for each length too; H3 is against the best of them.

The controller reads the features of the predictor, but remembers earlier ones, and may change the rate and
give a response in one decision. It estimates by how many points each action changes the score, and takes the
best if that promises more than a margin over what the reactive rule does. Training is a fitted iteration of
these values: some decisions are drawn, and the estimates are regressed on what followed. Several copies of
each network train on the same minibatches, so that the mean of the others is a baseline, and a critic that is
told the shifts predicts a part of the rest.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from studies import command_line
from studies.command_line import with_progress
from studies.streams.__main__ import (
    FUNCTION,
    LENGTH_RULE,
    ORACLE,
    RULE,
    TOLD,
    Scale,
    choose_by_facts,
    coordinate_search,
    judge_bank,
    make_banks,
    report,
    run_rule,
    score_rules,
    tune,
)  # fmt: skip
from studies.streams.data import LENGTHS, Bank, Floats
from studies.streams.networks import Seen, train
from studies.streams.policies import CHANGES, EVERY, RULE_GRIDS, Controlled, Ints, Settings

TRAINED, VALIDATED, JUDGED = 1_000_000, 40_000, 20_000  # first seeds of streams
TUNED = 100  # streams of each length to tune opponents on
# Has the settings of the rule and of the oracle that are told the shifts, which are not tuned again.
PUBLISHED = Path(__file__).parents[1] / "results" / "streams-cpu.jsonl.gz"
CONTROLLER = "controller"
BASE: Settings = (0.2, 96, 0.04, 16, 2, 1e-6)  # the published reactive rule: the controller may follow it
FEATURES, HIDDEN, ACTIONS = 20, 64, len(CHANGES)
PLANNED, UPDATES = 300, 200  # the rate would fall to a tenth in PLANNED; validation was level from 150 on
COPIES, ROWS = 8, 1024  # ROWS: networks of 96 minibatches; of longer streams fewer
DRAWN, WARMTH = 3.0, 0.3  # drawn decisions of a stream; points
MARGIN, ACTING = 0.1, 0.05  # points over the rule: in training, and after it (chosen on validation streams)
TRACE, KEPT, STEPS = 0.95, 60, 14  # of the advantages; updates that are learned from; steps of an update
RATE, CRITIC_RATE, AVERAGE = 2e-3, 2e-3, 0.05  # AVERAGE: share of the newest weights in those that act
TAIL = 3.0  # points from which on errors count linearly: a restart just before the end costs many


class Controller(nn.Module):
    """A GRU over decisions that estimates what each action is worth."""

    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(FEATURES, HIDDEN)
        self.memory = nn.GRU(HIDDEN, HIDDEN)
        self.head = nn.Linear(2 * HIDDEN, ACTIONS)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("scale", torch.ones(FEATURES))
        with torch.no_grad():
            self.head.weight.mul_(0.1)
            self.head.bias.zero_()

    def normalize(self, features: Tensor) -> Tensor:
        """Scale features to about unit variance.  # [..., FEATURES]"""
        return ((features - self.mean) / self.scale).clamp(-5, 5)

    def forward(self, features: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return values and the state after the last decision.  # [T, N, FEATURES] → [T, N, ACTIONS]"""
        read = self.read(self.normalize(features)).tanh()
        found, state = self.memory(read, state)
        return self.head(torch.cat([read, found], 2)), state


class Player:
    """Choose actions for networks, decision after decision.

    margin: points that an action must promise over the rule's. draw: draws a share of the decisions, half of
    them uniformly, and keeps what was seen and done.
    """

    def __init__(
        self,
        controller: Controller,
        margin: float = ACTING,
        draw: torch.Generator | None = None,
        share: float = 0.0,
    ) -> None:
        self.controller, self.margin, self.draw, self.share = controller, margin, draw, share
        self.state: Tensor | None = None
        self.kept: list[tuple[Tensor, Tensor, Tensor]] = []  # features, actions, whether drawn

    @torch.no_grad()
    def __call__(self, features: Floats) -> Ints:
        given = torch.from_numpy(features).float()
        found, self.state = self.controller(given[None], self.state)
        values = found[0]
        values[:, 0] += self.margin
        action = values.argmax(1)
        if self.draw is not None:
            chances = 0.5 / ACTIONS + 0.5 * (values / WARMTH).softmax(1)
            drawn = torch.rand(len(action), generator=self.draw) < self.share
            action = torch.where(drawn, torch.multinomial(chances, 1, generator=self.draw)[:, 0], action)
            self.kept.append((given, action, drawn))
        return action.numpy()


def play(bank: Bank, player: Player, copies: int) -> Tensor:
    """Train copies of a bank's networks; return the points of each decision.  # [T, copies, rows]

    These are the part of the score of its minibatches; the last decision has the accuracy at the end too.
    """
    policy, kept = Controlled(bank, torch.tensor([BASE] * copies), player), []

    def watched(step: int, seen: Seen) -> tuple[Tensor, Tensor]:
        kept[:] = [seen]
        return policy(step, seen)

    found = train(bank, watched, copies)
    accuracies = 100.0 * kept[0].accuracies.view(copies, bank.rows, -1)
    rewards = torch.stack([x.sum(2) for x in accuracies.split(EVERY, dim=2)[1:]]) / (2 * bank.length)
    rewards[-1] += found[..., 1] / 2
    return rewards


def describe_shifts(bank: Bank, features: Tensor) -> Tensor:
    """Return what the critic reads: features, those beside the mean of the copies, and the shifts.

    # [T, copies, rows, FEATURES] → [T, copies, rows, 2 * FEATURES + 4]
    """
    at = torch.arange(EVERY, bank.length, EVERY)
    later = bank.segment[:, -1:] - bank.segment
    age, span, left = (x[:, at].T.float() for x in (bank.age, bank.span, later))
    shifts = torch.stack([age.log1p(), (span - age).log1p(), left, (age < EVERY).float()], 2)[:, None]
    beside = features - features.mean(1, keepdim=True)
    return torch.cat([features, beside, shifts.expand(-1, features.shape[1], -1, -1)], 3)


def subtract_others(values: Tensor) -> Tensor:
    """Subtract the mean of the other copies.  # [T, copies, rows]"""
    return (values - values.mean(1, keepdim=True)) * (values.shape[1] / (values.shape[1] - 1))


def advantages(rewards: Tensor, values: Tensor) -> Tensor:
    """Return generalized advantages without discount.  # [T, ...], [T, ...] → [T, ...]"""
    found, ahead = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    following = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        ahead = rewards[t] + following - values[t] + TRACE * ahead
        found[t], following = ahead, values[t]
    return found


def train_controller(updates: int, seed: int = 0) -> Controller:
    """Train on streams that are drawn anew for every update; return the mean of the latest weights."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    controller = Controller()
    sizes = (2 * FEATURES + 4, 64, 64)
    critic = nn.Sequential(
        *(part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())),
        nn.Linear(sizes[-1], 1),
    )
    optimizer = torch.optim.AdamW(controller.parameters(), lr=RATE, weight_decay=0.01)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=CRITIC_RATE)
    average, kept = copy.deepcopy(controller), list[tuple[Tensor, ...]]()
    next_seed = TRAINED * (1 + seed)
    for update in with_progress("updates", range(updates)):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1.0 - 0.9 * (update / PLANNED))
        length = LENGTHS[update % len(LENGTHS)]
        count = ROWS * LENGTHS[0] // (length * COPIES)  # of streams
        bank = Bank(length, range(next_seed, next_seed + count), 1)
        next_seed += count
        player = Player(average, MARGIN, draw, min(0.2, DRAWN * EVERY / length))
        rewards = play(bank, player, COPIES)
        features, actions, drawn = (torch.stack(part) for part in zip(*player.kept, strict=True))
        if update == 0:
            for each in (controller, average):
                each.mean.copy_(features.flatten(0, 1).mean(0))
                each.scale.copy_(features.flatten(0, 1).std(0) + 1e-3)
        shaped = controller.normalize(features).view(*rewards.shape, -1)
        # One decision moves the score of a longer stream less: the factor makes gains of about one size.
        told, rewards = describe_shifts(bank, shaped), subtract_others(rewards) * (length / LENGTHS[0]) ** 0.5
        with torch.no_grad():
            values = critic(told)[..., 0]
        gains = advantages(rewards, values)
        for _ in range(3):
            critic_optimizer.zero_grad()
            nn.functional.mse_loss(critic(told)[..., 0], gains + values).backward()  # type: ignore[no-untyped-call]
            critic_optimizer.step()
        kept = [*kept[-KEPT + 1 :], (features, actions, drawn, gains.flatten(1))]
        for step in range(STEPS):
            which = -1 if step < 2 else int(torch.randint(len(kept), (), generator=draw))
            features, actions, drawn, gains = kept[which]
            part = torch.randperm(features.shape[1], generator=draw)[: features.shape[1] // 2]
            found = controller(features[:, part])[0].gather(2, actions[:, part, None])[..., 0]
            errors = nn.functional.huber_loss(found, gains[:, part], reduction="none", delta=TAIL)
            weights = drawn[:, part] + 0.3 * ~drawn[:, part]
            optimizer.zero_grad()
            ((weights * errors).sum() / weights.sum()).backward()
            nn.utils.clip_grad_norm_(controller.parameters(), 1.0)
            optimizer.step()
        for mean, new in zip(average.parameters(), controller.parameters(), strict=True):
            mean.data.lerp_(new.data, AVERAGE)
    return average


def judge(scale: Scale, controller: Controller) -> Iterator[dict[str, Any]]:
    """Tune the opponents again; yield what was chosen, then a record for each fresh stream."""
    tuned = make_banks(0, TUNED, 1)
    chosen = tune(tuned, scale.sweeps)
    rules = {
        bank.length: coordinate_search(partial(score_rules, [bank]), RULE_GRIDS, chosen[RULE], 1)
        for bank in with_progress("rules", tuned)
    }
    published = json.loads(command_line.read_text(PUBLISHED).splitlines()[0])["tuned"]
    chosen |= {name: tuple(published[name]) for name in (TOLD, ORACLE)}
    model, _ = choose_by_facts(tuned, chosen[FUNCTION], tuned[0])
    yield {"tuned": {**chosen, LENGTH_RULE: rules, FUNCTION: model}}
    for bank in with_progress("judged", make_banks(JUDGED, scale.judged, scale.twins)):
        learned = {
            CONTROLLER: run_rule(bank, BASE, Player(controller)),
            LENGTH_RULE: run_rule(bank, rules[bank.length]),
        }
        yield from judge_bank(bank, tuned, chosen, learned, scale)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and judge, or print the tables of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each stream")
    parser.add_argument("--weights", type=Path, help="of the controller: read if it is there, else written")
    parser.add_argument("--read", type=Path, help="a file to report on")
    given = parser.parse_args(arguments)
    if given.read:
        print(
            report([json.loads(line) for line in command_line.read_text(given.read).splitlines()], CONTROLLER)
        )
        return
    if given.out is None or given.weights is None:
        parser.error("give --out and --weights to train and judge, or --read to report")
    torch.set_num_threads(1)
    if given.weights.exists():
        controller = Controller()
        controller.load_state_dict(torch.load(given.weights, weights_only=True))
    else:
        controller = train_controller(UPDATES)
        torch.save(controller.state_dict(), given.weights)
    lines = []
    with given.out.open("w") as file:
        for record in judge(Scale(), controller):
            lines.append(json.dumps(record))
            print(lines[-1], file=file, flush=True)
    print(report([json.loads(line) for line in lines], CONTROLLER))


if __name__ == "__main__":
    command_line.run(main)
