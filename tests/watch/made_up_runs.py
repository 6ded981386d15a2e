"""Run folders as training, growing and comparing leave them, full of plausible numbers, in no time."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from esper.runs.lanes import NO_BLUEPRINT, Lanes, kept_rounds
from esper.runs.run_folder import RunFolder
from esper.runs.schema import Event, RoundSummary
from tests.runs.made_up_lanes import BLUEPRINTS, OPS, STAGES, made_up_lanes

HEADS = ("slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve", "op")
STEPS = 24


def summary(number: int, rounds: int = 40, members: int = 64, gain: float = 0.2) -> RoundSummary:
    """Round `number` of a run that learns."""
    draw = np.random.default_rng((7, number))
    learnt = 1 - math.exp(-3 * number / rounds)
    shares = np.array([0.55 + 0.2 * learnt, 0.12, 0.04, 0.1 * (1.3 - learnt), 0.03 + 0.05 * learnt, 0.14])
    steps = np.linspace(0, 1, STEPS)[:, None]
    by_step = shares * (1 + np.array([0.0, 2.0, -0.5, 0.5, -0.8, 0.5]) * (0.5 - steps))
    seeds = {"CONV_LIGHT": 0.4 + learnt, "NORM": 0.7 * (1.1 - learnt), "ATTENTION": 0.35, "DEPTHWISE": 0.3}
    mean = -0.05 + gain * learnt + 0.008 * draw.normal()
    return RoundSummary(
        round=number,
        rounds=rounds,
        members=members,
        member_epochs=STEPS * members * number,
        seconds=3.1 * number,
        return_mean=mean,
        return_ci=0.16 / math.sqrt(members),
        accuracy_mean=0.56 + 0.5 * gain + gain * learnt + 0.004 * draw.normal(),
        accuracy_ci=0.12 / math.sqrt(members),
        parameter_ratio_mean=1.9 - 0.4 * learnt,
        parameter_ratio_ci=0.5 / math.sqrt(members),
        op_shares=dict(zip(OPS.values(), (shares / shares.sum()).tolist(), strict=True)),
        op_shares_by_step=(by_step / by_step.sum(axis=1, keepdims=True)).tolist(),
        head_entropy={head: 1 - learnt * (0.15 + 0.08 * i) for i, head in enumerate(HEADS)},
        policy_loss=0.01,
        value_loss=0.4 * math.exp(-3 * number / rounds),
        entropy=0.8 - 0.3 * learnt,
        kl=0.012 + 0.004 * abs(draw.normal()),
        clip_fraction=0.11,
        explained_variance=0.7 * learnt,
        gradient_norm=1.4 + 0.3 * draw.normal(),
        extra={"above_twin": mean - 0.03, "above_twin_ci": 0.1 / math.sqrt(members)}
        | {f"planted/{name}": value for name, value in seeds.items()},
        anomalies=["the governor rolled 2 of 64 members back, 2 times"] if number % 13 == 0 else [],
    )


def events_of(lanes: Lanes, most: int = 2000) -> list[Event]:
    """Where a slot's stage changed, as the trainer would tell it."""
    stage, blueprint = lanes.columns["stage"].astype(int), lanes.columns["blueprint"]
    kinds = {2: "germinated", 7: "fossilised", 8: "pruned"}
    found = []
    for t, n, s in np.argwhere(stage[1:] != stage[:-1])[:most].tolist():
        now, seed = stage[t + 1, n, s], max(blueprint[t + 1, n, s], blueprint[t, n, s])
        seed = min(blueprint[t + 1, n, s], blueprint[t, n, s]) if seed == NO_BLUEPRINT else seed
        if now not in (2, 3, 4, 6, 7, 8):
            continue
        found.append(
            Event(
                round=lanes.round,
                step=t + 1,
                member=n,
                kind=kinds.get(now, "stage_changed"),  # type: ignore[arg-type]
                slot=lanes.slots[s],
                blueprint=BLUEPRINTS.get(int(seed)),
                stage_from=STAGES[stage[t, n, s]],
                stage_to=STAGES[now],
                numbers={"contribution": float(lanes.columns["contribution"][t + 1, n, s]) / 100}
                if now == 7
                else {"age": float(t % 9)},
            )
        )
    return found


def trained(path: Path, rounds: int = 40, of: int = 40, members: int = 64, gain: float = 0.2, seed: int = 0,
            steps: int = STEPS, slots: int = 3, note: str = "") -> RunFolder:  # fmt: skip
    """A training run of so many rounds; it is still open."""
    config = f"seed: {seed}\ntask: mnist1d\nmembers: {members}\nrounds: {of}\nppo:\n  clip: {gain}\n{note}"
    command = ["esper", "train", "--preset", "demo"]
    folder = RunFolder.create(path, config=config, seed=seed, command=command)
    for number in range(1, rounds + 1):
        if number in kept_rounds(rounds, 12):
            lanes = made_up_lanes(number, members, steps, slots, seed)
            folder.append_events(events_of(lanes))
            folder.lanes.write(lanes, 12)
    folder.metrics_file.append(summary(number, of, members, gain) for number in range(1, rounds + 1))
    return folder


def add_round(folder: RunFolder, number: int, of: int = 40, members: int = 64) -> None:
    """One more round, in the order in which a run writes."""
    lanes = made_up_lanes(number, members)
    folder.append_events(events_of(lanes))
    folder.append_metrics(summary(number, of, members))
    folder.lanes.write(lanes, 12)
