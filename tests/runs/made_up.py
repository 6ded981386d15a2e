"""Run folders as training, growing and comparing leave them, full of plausible numbers, in no time."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from esper.runs.run_folder import RunFolder
from esper.runs.schema import Comparison, ControllerResult, Event, RoundSummary, paired_differences
from esper.runs.trajectories import COLUMNS, NO_BLUEPRINT, UNMEASURED, HostPart, Trajectories, kept_rounds

STAGES = {
    0: "UNKNOWN", 1: "DORMANT", 2: "GERMINATED", 3: "TRAINING", 4: "BLENDING", 6: "HOLDING",
    7: "FOSSILIZED", 8: "PRUNED", 9: "EMBARGOED", 10: "RESETTING",
}  # fmt: skip
OPS = dict(enumerate(("WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE")))
RATES = dict(enumerate(("KEEP", "DOUBLE", "HALVE", "DECAY")))
BLUEPRINTS = dict(enumerate(("NOOP", "CONV_LIGHT", "ATTENTION", "NORM", "DEPTHWISE", "BOTTLENECK")))
HOST = 882
_SIZES = np.array([0, 600, 40, 17, 152, 384])
_PATIENCE = {2: 1, 3: 3, 4: 5, 6: 2, 8: 1, 9: 3, 10: 1}  # steps in a stage


def made_up_trajectories(
    round: int = 1,
    members: int = 16,
    steps: int = 24,
    slots: int = 3,
    seed: int = 0,
    title: str = "",
    rates: bool = False,
) -> Trajectories:
    """Seeds that are planted, blend, stay or go; better rounds keep more. Rates that are set, if asked."""
    draw = np.random.default_rng((seed, round))
    stage = np.full((steps, members, slots), 1)
    alpha = np.zeros((steps, members, slots))
    blueprint = np.full((steps, members, slots), NO_BLUEPRINT)
    points = np.full((steps, members, slots), float(UNMEASURED))
    op, op_slot = np.zeros((steps, members), int), np.zeros((steps, members), int)
    for n in range(members):
        for s in range(slots):
            columns_of_slot = (array[:, n, s] for array in (stage, alpha, blueprint, points))
            _live(draw, round, *columns_of_slot, (op[:, n], op_slot[:, n], s))
    heard = np.isin(stage, (4, 6, 7)) * alpha
    grown = (np.where(blueprint == NO_BLUEPRINT, 0, _SIZES[np.minimum(blueprint, 5)])).sum(-1)
    parameters = np.vstack([np.full((1, members), HOST), HOST + grown])
    clock = np.linspace(0, 1, steps + 1)[:, None]
    base = 0.35 + 0.3 * clock**0.5 + draw.normal(0, 0.03, members)
    gain = np.vstack([np.zeros((1, members)), 0.06 * heard.sum(-1)])
    accuracy = np.clip(base + gain + draw.normal(0, 0.008, base.shape), 0, 1)
    spent = np.cumsum(parameters * 1e5, axis=0) - parameters[0] * 1e5
    columns = {
        "members": np.arange(members),
        "returns": accuracy[-1] - accuracy[0] - 0.05 * np.log(parameters[-1] / HOST),
        "stage": stage, "alpha": 255 * alpha, "blueprint": blueprint, "contribution": points, "op": op,
        "op_slot": op_slot, "succeeded": draw.random((steps, members)) < 0.85,
        "rolled_back": draw.random((steps, members)) < 0.002, "accuracy": accuracy, "parameters": parameters,
        "spent": spent, "seed_parameters": np.tile(_SIZES, (slots, 1)),
    }  # fmt: skip
    if rates:
        columns |= _rates(draw, steps, members)
    layers = ("Conv1d(8, 8, kernel_size=(3,))", "GroupNorm(1, 8)", "ReLU()")
    parts = [HostPart(f"segment {i + 1}", layers, 210, (8, 40 >> i)) for i in range(slots)]
    return Trajectories(
        round=round,
        slots=[f"r0c{i}" for i in range(slots)],
        parts=[*parts, HostPart("head", ("Linear(8, 10)",), 90, (10,))],
        stage_names=STAGES,
        op_names=OPS,
        blueprint_names=BLUEPRINTS,
        rate_names=RATES,
        columns={name: np.asarray(column).astype(COLUMNS[name][0]) for name, column in columns.items()},
        title=title,
    )


def _rates(draw: np.random.Generator, steps: int, members: int) -> dict[str, np.ndarray]:
    """Rates that begin anywhere, are changed at random, and fall to 0 once that was chosen."""
    choice = draw.choice(4, (steps, members), p=[0.6, 0.2, 0.15, 0.05])
    rate = np.zeros((steps + 1, members))
    rate[0] = np.exp(draw.uniform(-2.3, 2.3, members))
    for n in range(members):
        fall = 0.0  # of a step
        for t in range(steps):
            choice[t, n] *= fall == 0
            rate[t + 1, n] = rate[t, n] * {1: 2.0, 2: 0.5}.get(int(choice[t, n]), 1.0) - fall
            if choice[t, n] == 3:
                fall = rate[t + 1, n] / max(steps - 1 - t, 1)
    return {"rate": rate.clip(0), "rate_choice": choice}


def _live(draw, round, stage, alpha, blueprint, points, ops) -> None:  # type: ignore[no-untyped-def]
    """One slot's life, written into its columns."""
    op, op_slot, s = ops
    t = int(draw.integers(0, 7)) + 3 * s
    good = draw.random() < min(0.35 + 0.03 * round, 0.85)
    path = (2, 3, 4, 6, 7) if good else (2, 3, 4, 8, 9, 10, 1)
    kind = int(draw.integers(1, len(BLUEPRINTS)))
    for now in path:
        length = _PATIENCE.get(now, len(stage)) + int(draw.integers(0, 2))
        span = slice(t, t + length)
        if t >= len(stage):
            return
        op[t], op_slot[t] = {2: 1, 7: 4, 8: 3}.get(now, 5 if now in (3, 4, 6) else 0), s
        stage[span] = now
        if now in (2, 3, 4, 6, 7):
            blueprint[span] = kind
        if now == 4:
            alpha[span] = np.linspace(0.15, 1, length)[: len(alpha[span])]
        if now in (6, 7):
            alpha[span] = 1
        if now in (4, 6, 7):
            points[span] = 100 * draw.normal(2.2 if good else -0.6, 0.8, len(points[span]))
        t += length


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


def events_of(trajectories: Trajectories, most: int = 2000) -> list[Event]:
    """Where a slot's stage changed, as the trainer would tell it."""
    stage, blueprint = trajectories.columns["stage"].astype(int), trajectories.columns["blueprint"]
    kinds = {2: "germinated", 7: "fossilised", 8: "pruned"}
    found = []
    for t, n, s in np.argwhere(stage[1:] != stage[:-1])[:most].tolist():
        before, now = stage[t, n, s], stage[t + 1, n, s]
        seed = int(min(blueprint[t : t + 2, n, s]))  # the one that is not NO_BLUEPRINT
        points = float(trajectories.columns["contribution"][t + 1, n, s]) / 100
        numbers = {"contribution": points} if now == 7 else {"age": float(t % 9)}
        names = (trajectories.slots[s], BLUEPRINTS.get(seed), STAGES[before], STAGES[now], None, numbers)
        if now in (2, 3, 4, 6, 7, 8):
            found.append(Event(trajectories.round, t + 1, n, kinds.get(now, "stage_changed"), *names))  # type: ignore[arg-type]
    for t, n in np.argwhere(trajectories.columns.get("rate_choice", np.zeros((0, 0)))).tolist():
        before, after = trajectories.columns["rate"][t : t + 2, n].tolist()
        name = RATES[int(trajectories.columns["rate_choice"][t, n])]
        numbers = {"rate": after, "rate_before": before}
        found.append(Event(trajectories.round, t, n, "rate_changed", rate=name, numbers=numbers))
    return sorted(found, key=lambda event: event.step)


def trained(
    path: Path,
    rounds: int = 40,
    of: int = 40,
    members: int = 64,
    gain: float = 0.2,
    note: str = "",
    rates: bool = False,
) -> RunFolder:
    """A training run of so many rounds; it is still open."""
    config = f"seed: 0\ntask: mnist1d\nmembers: {members}\nrounds: {of}\nppo:\n  clip: {gain}\n{note}"
    folder = RunFolder.create(path, config=config, seed=0, command=["esper", "train", "--preset", "demo"])
    for number in sorted(kept_rounds(rounds, 12)) if rounds else ():
        trajectories = made_up_trajectories(number, members, rates=rates)
        folder.events_file.append(*events_of(trajectories))
        folder.trajectories.write(trajectories, 12)
    folder.metrics_file.append(*(summary(number, of, members, gain) for number in range(1, rounds + 1)))
    return folder


def add_round(folder: RunFolder, number: int, of: int = 40, members: int = 64) -> None:
    """One more round, in the order in which a run writes."""
    trajectories = made_up_trajectories(number, members)
    folder.events_file.append(*events_of(trajectories))
    folder.metrics_file.append(summary(number, of, members))
    folder.trajectories.write(trajectories, 12)


def comparison(members: int = 24) -> Comparison:
    """Three controllers on the same members."""
    draw, ids = np.random.default_rng(0), list(range(members))
    host = draw.normal(0.9, 0.02, members)

    def result(name: str, gain: float, size: float) -> ControllerResult:
        accuracy = (host + gain + draw.normal(0, 0.006, members)).tolist()
        parameters = (900 * size * draw.uniform(0.8, 1.25 if size > 1 else 0.81, members)).tolist()
        return ControllerResult(name, ids, accuracy, parameters, [40.0] * members, [3.2e9 * size] * members)

    arms = [result("static", 0.0, 1.0), result("random", 0.01, 1.5), result("tamiyo", 0.04, 1.4)]
    return Comparison("digits", "cnn(width=4)", arms, paired_differences(arms))
