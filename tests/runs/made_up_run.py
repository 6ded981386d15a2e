"""A run folder full of plausible numbers, for tests of what is drawn from one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from esper.runs.run_folder import RunFolder
from esper.runs.schema import Comparison, ControllerResult, Event, RoundSummary, paired_differences

OPS = ("WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE")
HEADS = ("slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve", "op")
SIZES = {"CONV_LIGHT": 2336, "NORM": 33, "ATTENTION": 148, "DEPTHWISE": 432, "CONV_SMALL": 288}


def made_up_run(path: Path, rounds: int = 24) -> RunFolder:
    draw = np.random.default_rng(0)
    config = "seed: 7\ntask: digits\nnote: <script>alert('no')</script>\n"
    folder = RunFolder.create(path, config=config, seed=7, command=["esper", "train", "--preset", "demo"])
    for number in range(1, rounds + 1):
        folder.append_events(_events(number, draw))
        folder.append_metrics(_summary(number, rounds, draw))
    controllers = [_controller(name, gain, size, draw) for name, gain, size in _CONTROLLERS]
    folder.write(Comparison("digits", "cnn(width=4)", controllers, paired_differences(controllers)))
    return folder


_CONTROLLERS = (("static", 0.0, 1.0), ("random", 0.01, 1.5), ("heuristic", 0.03, 1.6), ("tamiyo", 0.04, 1.4))


def _summary(number: int, rounds: int, draw: np.random.Generator) -> RoundSummary:
    learnt = 1 - math.exp(-number / 8)
    shares = np.array([0.55 + 0.2 * learnt, 0.12, 0.04, 0.08 * (1.2 - learnt), 0.04, 0.14])
    shares /= shares.sum()
    steps = np.linspace(0, 1, 40)[:, None]
    by_step = shares * (1 + np.array([0.0, 2.0, -0.5, 0.5, -0.8, 0.5]) * (0.5 - steps))
    return RoundSummary(
        round=number,
        rounds=rounds,
        members=16,
        member_epochs=640 * number,
        seconds=3.1 * number,
        return_mean=-0.05 + 0.2 * learnt + 0.01 * draw.normal(),
        return_ci=0.03,
        accuracy_mean=0.86 + 0.06 * learnt,
        accuracy_ci=0.01,
        parameter_ratio_mean=1.9 - 0.4 * learnt,
        parameter_ratio_ci=0.08,
        op_shares=dict(zip(OPS, shares.tolist(), strict=True)),
        op_shares_by_step=(by_step / by_step.sum(axis=1, keepdims=True)).tolist(),
        head_entropy={head: 1 - learnt * (0.2 + 0.08 * i) for i, head in enumerate(HEADS)},
        policy_loss=0.01,
        value_loss=0.4 * math.exp(-number / 9),
        entropy=0.8,
        kl=0.012 + 0.004 * draw.normal(),
        clip_fraction=0.11,
        explained_variance=0.7 * learnt,
        anomalies=["member 4 was rolled back: loss 41 & rising"] if number == 9 else [],
    )


def _events(number: int, draw: np.random.Generator) -> list[Event]:
    events = []
    for member in range(6):
        blueprint = str(draw.choice(list(SIZES)))
        seed = {"round": number, "member": member, "slot": "r0c0", "blueprint": blueprint}
        events.append(Event(step=2, kind="germinated", **seed))  # type: ignore[arg-type]
        worth = float(draw.normal(1.0 + math.log10(SIZES[blueprint]) / 2, 1.5))
        numbers = {"contribution": worth, "parameters": float(SIZES[blueprint])}
        if worth > 1:
            events.append(Event(step=24, kind="fossilised", numbers=numbers, **seed))  # type: ignore[arg-type]
        elif worth < 0:
            events.append(Event(step=20, kind="pruned", numbers=numbers, **seed))  # type: ignore[arg-type]
    return events


def _controller(name: str, gain: float, size: float, draw: np.random.Generator) -> ControllerResult:
    members = list(range(24))
    host = np.random.default_rng(1).normal(0.9, 0.02, len(members))
    return ControllerResult(
        name=name,
        members=members,
        test_accuracy=(host + gain + draw.normal(0, 0.006, len(members))).tolist(),
        parameters=(900 * size * draw.uniform(0.8, 1.25 if size > 1 else 0.81, len(members))).tolist(),
        member_epochs=[40.0] * len(members),
        flops=[3.2e9 * size] * len(members),
    )
