"""What could a controller win on a stream whose data shift at unknown times? The headroom, before training.

    python -m studies.streams --out FILE      half an hour of one core; extra rates
    python -m studies.streams --read FILE     the table, at once

A small perceptron trains on a stream of fresh minibatches of a made table. At 0 to 4 unknown times the rule
behind the data changes. The score, in points, is the mean of two accuracies: that on every minibatch before
it is trained on, over the whole stream, and that on fresh samples of the last rule at the end. A controller
reads the losses and accuracies of its network so far and decides every 6 minibatches: keep, double, quadruple
or halve the rate, start or stop its fall to 0, reset the optimizer, restart the last layer too. Everything is
tuned or trained on other streams than those that are judged.

    H1   the best plan in hindsight for each stream minus the best function of length, features and classes
    H2   what a predictor wins over that function, which reads the stream so far
    H3   what it wins over the better of that function and a tuned reactive rule

The best plan for a stream is found with half of its networks and scored by the other half.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies import command_line
from studies.command_line import with_progress
from studies.headroom.analysis import LEAST_SHARE, best_model, choose, interval, verdict
from studies.rates import FRESH
from studies.streams.data import LENGTHS, Bank, Floats
from studies.streams.networks import train, train_schedule_free
from studies.streams.policies import (
    FIXED,
    FORMS,
    RATES,
    RESPONSES,
    RULE_GRIDS,
    Chooser,
    Controlled,
    Settings,
    fixed_policy,
    hindsight,
    in_parts,
    known_facts,
    mean_score,
    oracle_plans,
    segment_policy,
)  # fmt: skip
from studies.streams.predictor import fit_predictor

ORACLE_GRIDS = tuple(
    tuple(range(size)) for size in (len(RATES), len(FORMS), *(len(RATES), len(FORMS), len(RESPONSES)) * 3)
)
ORACLE_START: Settings = (4, 0, *(4, 0, 0) * 3)
FREE_RATES = tuple(0.01 * 2.0**k for k in range(7))  # of schedule-free AdamW
FUNCTION, HINDSIGHT, LUCKY = "function of known facts", "best plan in hindsight", "best plan, luck included"
PREDICTOR, RULE, RATE_RULE = "predictor", "reactive rule", "reactive rule of the rate alone"
ORACLE, CONSTANT = "told the shifts", "constant rate"
TOLD = "reactive rule, told each shift"  # at the next decision
LENGTH_RULE = "reactive rule of each length"  # tuned for it
OPPONENTS = (FUNCTION, RATE_RULE, RULE, LENGTH_RULE)  # H3 is against the best of them
SHOWN = (ORACLE, TOLD, RULE, RATE_RULE, CONSTANT, "decay", "schedule-free AdamW")  # minus the function


@dataclass(frozen=True)
class Scale:
    """Streams of each length, to tune on, to train the predictor on and to judge; and how much is tried."""

    tuned: int = 30
    trained: int = 80
    judged: int = 60
    twins: int = 4  # of streams to train on and to judge; two of those to tune on
    repeats: int = 3  # branches of each of the predictor's networks
    rounds: int = 3  # of the search in hindsight, after the first
    tries: int = 20  # plans of a round
    sweeps: int = 2  # of the coordinate searches


def make_banks(first_seed: int, each: int, twins: int) -> list[Bank]:
    """Draw `each` streams of every length; seeds from first_seed on."""
    return [Bank(length, range(first_seed, first_seed + each), twins) for length in LENGTHS]


def coordinate_search(
    value: Callable[[list[Settings]], Floats], grids: Sequence[Settings], start: Settings, sweeps: int
) -> Settings:
    """Improve one setting after another by trying all values of its grid."""
    best = start
    for _ in range(sweeps):
        for k, grid in enumerate(grids):
            tried = [(*best[:k], x, *best[k + 1 :]) for x in grid]
            best = tried[int(value(tried).argmax())]
    return best


# ---- tuned on made streams ---------------------------------------------------------------------------------


def score_rules(banks: Sequence[Bank], tried: Sequence[Settings], told: bool = False) -> Floats:
    """Return the mean score of the reactive rule with each of these settings."""
    policy = partial(Controlled, told=told)
    return mean_score([in_parts(bank, torch.tensor(tried), policy) for bank in banks])


def tune(banks: Sequence[Bank], sweeps: int) -> dict[str, Any]:
    """Choose the settings of all that reads no shift, and fit the function of what is known beforehand."""
    plans = torch.tensor(FIXED)
    fixed = [in_parts(bank, plans, fixed_policy) for bank in with_progress("fixed plans", banks)]
    means = mean_score(fixed)
    constant = max((k for k, plan in enumerate(FIXED) if plan[1] == 1.0), key=lambda k: means[k])
    free = [mean_score([train_schedule_free(bank, rate) for bank in banks])[0] for rate in FREE_RATES]
    rate, start = FIXED[int(means.argmax())]
    # Two parameters; the first rate and the fall at the end are those of the best fixed plan.
    rules = partial(score_rules, banks)
    two = coordinate_search(rules, RULE_GRIDS[:2], (0.2, 48, rate, 16, 0, max(1e-6, 1.0 - start)), sweeps)
    return {
        CONSTANT: FIXED[constant],
        "decay": max((plan for plan in FIXED if plan[1] < 1.0), key=lambda plan: means[FIXED.index(plan)]),
        "schedule-free AdamW": FREE_RATES[int(np.argmax(free))],
        RATE_RULE: two,
        RULE: coordinate_search(rules, RULE_GRIDS, (*two[:4], 2, two[5]), sweeps),
        FUNCTION: [scores.mean(2).T.double().numpy() for scores in fixed],  # [rows, plans] for each bank
    }


def tune_told(banks: Sequence[Bank], two: Settings, sweeps: int) -> dict[str, Settings]:
    """Choose the settings of the rule and of the oracle that are told the shifts; two: those of RATE_RULE."""

    def oracles(tried: list[Settings]) -> Floats:
        return mean_score(
            [
                in_parts(bank, torch.stack([oracle_plans(bank, one) for one in tried]), segment_policy)
                for bank in banks
            ]
        )

    told = partial(score_rules, banks, told=True)
    return {
        TOLD: coordinate_search(told, RULE_GRIDS, (*two[:4], 2, two[5]), sweeps),
        ORACLE: coordinate_search(oracles, ORACLE_GRIDS, ORACLE_START, sweeps),
    }


def choose_by_facts(tuned: Sequence[Bank], scores: Sequence[Floats], judged: Bank) -> tuple[str, Tensor]:
    """Return the form of the best function of known facts, and the plan it has for each row [1, rows, 2]."""
    twins = tuned[0].twins
    values = np.concatenate([s.reshape(-1, twins, len(FIXED)) for s in scores])  # [streams, twins, plans]
    order = np.argsort(-values.mean(axis=(0, 1)))  # the best first: gains are counted from there
    values = values[..., order]
    facts = np.concatenate([known_facts(bank) for bank in tuned])
    model = best_model(np.repeat(facts[:, None], twins, 1), values, np.arange(len(facts)))
    gains = (values - values[..., :1]).mean(1)
    found = order[choose(facts, gains, known_facts(judged), model)]
    return model, torch.tensor(FIXED)[torch.from_numpy(found)][judged.stream_of][None]


# ---- judged on fresh streams -------------------------------------------------------------------------------


def judge(scale: Scale) -> Iterator[dict[str, Any]]:
    """Tune and train; yield what was chosen, then a record for each fresh stream."""
    tuned = make_banks(0, scale.tuned, 2)
    chosen = tune(tuned, scale.sweeps)
    chosen |= tune_told(tuned, chosen[RATE_RULE], scale.sweeps)
    trained = make_banks(FRESH // 2, scale.trained, scale.twins)
    settings = chosen[RULE], chosen[ORACLE]
    chooser, log = fit_predictor(trained, tuned, settings, scale.repeats)
    model, _ = choose_by_facts(tuned, chosen[FUNCTION], tuned[0])
    kept = {name: value for name, value in chosen.items() if name != FUNCTION}
    yield {"tuned": {**kept, FUNCTION: model}, "predictors": [[name, round(x, 3)] for name, x in log]}
    for bank in with_progress("judged", make_banks(FRESH, scale.judged, scale.twins)):
        learned = {PREDICTOR: run_rule(bank, chosen[RULE], chooser)}
        yield from judge_bank(bank, tuned, chosen, learned, scale)


def judge_bank(
    bank: Bank, tuned: Sequence[Bank], chosen: Mapping[str, Any], learned: Mapping[str, Tensor], scale: Scale
) -> Iterator[dict[str, Any]]:
    """Run all opponents; yield a record for each stream. learned: scores of what was trained [1, rows, 2]."""
    function = choose_by_facts(tuned, chosen[FUNCTION], bank)[1]
    honest, lucky = hindsight(bank, chosen[ORACLE], scale.rounds, scale.tries)
    arms = {
        **{name: run_rule(bank, chosen[name]) for name in (RATE_RULE, RULE)},
        TOLD: run_rule(bank, chosen[TOLD], told=True),
        **{n: train(bank, fixed_policy(bank, torch.tensor([chosen[n]])), 1) for n in (CONSTANT, "decay")},
        "schedule-free AdamW": train_schedule_free(bank, chosen["schedule-free AdamW"]),
        ORACLE: train(bank, segment_policy(bank, oracle_plans(bank, chosen[ORACLE])[None]), 1),
        FUNCTION: train(bank, fixed_policy(bank, function), 1),
        **learned,
        HINDSIGHT: honest[None],
        LUCKY: lucky[None],
    }
    for k, stream in enumerate(bank.streams):
        mine = slice(k * bank.twins, (k + 1) * bank.twins)
        yield {
            "length": bank.length,
            "features": stream.features,
            "classes": stream.classes,
            "noise": round(stream.noise, 3),
            "shifts": [[at, kind, round(severity, 3)] for at, kind, severity in stream.shifts],
            # [twins][2]: accuracy over the stream and at the end
            "arms": {n: np.round(x[0, mine].double().numpy(), 2).tolist() for n, x in arms.items()},
        }


def run_rule(bank: Bank, settings: Settings, chooser: Chooser | None = None, told: bool = False) -> Tensor:
    """Train under the reactive rule, or under a predictor that may do something else.  # → [1, rows, 2]"""
    return train(bank, Controlled(bank, torch.tensor([settings]), chooser, told=told), 1)


def report(records: Sequence[Mapping[str, Any]], learned: str = PREDICTOR) -> str:
    """Return the tables of a file, with a sentence on what follows; learned: the arm of H2 and H3."""
    first, *streams = records
    both = {n: np.array([r["arms"][n] for r in streams]).mean(axis=1) for n in streams[0]["arms"]}
    of = {name: each.mean(axis=1) for name, each in both.items()}  # [streams]
    # The best on these very streams: chance helps the opponent, never the predictor.
    opponent = max((n for n in OPPONENTS if n in of), key=lambda name: float(of[name].mean()))
    pairs = {
        "H1": (HINDSIGHT, FUNCTION), "H2": (learned, FUNCTION), "H3": (learned, opponent),
        "upper bound of H1": (LUCKY, FUNCTION), **{f"{n} − function": (n, FUNCTION) for n in SHOWN},
        **{f"{learned} − {n}": (learned, n) for n in (RATE_RULE, RULE, TOLD, "schedule-free AdamW")},
        "reactive rule, told each shift − reactive rule": (TOLD, RULE),
    }  # fmt: skip
    lines = ["| arm | over the stream | at the end | score |", "|---|---:|---:|---:|"]
    for name in sorted(of, key=lambda n: -of[n].mean()):
        online, end = both[name].mean(axis=0)
        lines.append(f"| {name} | {online:.2f} | {end:.2f} | {of[name].mean():.2f} |")
    lines += ["", "| points of score | mean | 95 % interval | streams |", "|---|---:|---:|---:|"]
    count = np.array([len(record["shifts"]) for record in streams])
    length = np.array([record["length"] for record in streams])
    groups = {f" with {n} shift{'' if n == 1 else 's'}": count == n for n in np.unique(count)}
    groups |= {f", {n} minibatches": length == n for n in np.unique(length)}
    found = {}
    for name, (one, other) in pairs.items():
        found[name] = interval(of[one] - of[other], np.arange(len(streams)))
        parts = {"": np.ones(len(streams), bool), **(groups if name in ("H1", "H2", "H3") else {})}
        for part, here in parts.items():
            mean, low, high = interval((of[one] - of[other])[here], np.arange(here.sum()))
            lines.append(f"| {name}{part} | {mean:+.2f} | {low:+.2f} to {high:+.2f} | {here.sum()} |")
    short = of[learned] - of[opponent] - LEAST_SHARE * (of[HINDSIGHT] - of[FUNCTION])
    mean, low, high = interval(short, np.arange(len(streams)))
    lines.append(f"| H3 − {LEAST_SHARE} · H1 | {mean:+.2f} | {low:+.2f} to {high:+.2f} | {len(streams)} |")
    lines += ["", *(f"{name}: {value}" for name, value in first["tuned"].items())]
    if learned == PREDICTOR:
        best, where = max(first["predictors"], key=lambda pair: pair[1]), first["predictors"][0][1]
        lines += [f"predictor: {best[0]} ({best[1]:.2f} where it was chosen; the rule {where:.2f})"]
    h1, h3 = found["H1"], found["H3"]
    return "\n".join([*lines, "", f"H3 is against: {opponent}. {verdict(h1[0], h3[0], h1[1], h3[1])}"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, train and judge, or print the tables of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each stream")
    parser.add_argument("--read", type=Path, help="a file to report on")
    given = parser.parse_args(arguments)
    if given.read:
        print(report([json.loads(line) for line in command_line.read_text(given.read).splitlines()]))
        return
    if given.out is None:
        parser.error("give --out to train, or --read to report")
    torch.set_num_threads(1)
    lines = []
    with given.out.open("w") as file:
        for record in judge(Scale()):
            lines.append(json.dumps(record))
            print(lines[-1], file=file, flush=True)
    print(report([json.loads(line) for line in lines]))


if __name__ == "__main__":
    command_line.run(main)
