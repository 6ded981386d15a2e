"""Lanes full of plausible lives, for tests of what is kept of a round and drawn from it."""

from __future__ import annotations

import numpy as np

from esper.runs.lanes import COLUMNS, NO_BLUEPRINT, UNMEASURED, HostPart, Lanes

STAGES = {
    0: "UNKNOWN", 1: "DORMANT", 2: "GERMINATED", 3: "TRAINING", 4: "BLENDING", 6: "HOLDING",
    7: "FOSSILIZED", 8: "PRUNED", 9: "EMBARGOED", 10: "RESETTING",
}  # fmt: skip
OPS = dict(enumerate(("WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE")))
BLUEPRINTS = dict(enumerate(("NOOP", "CONV_LIGHT", "ATTENTION", "NORM", "DEPTHWISE", "BOTTLENECK")))
HOST = 882
_SIZES = np.array([0, 600, 40, 17, 152, 384])
_PATIENCE = {2: 1, 3: 3, 4: 5, 6: 2, 8: 1, 9: 3, 10: 1}  # steps in a stage


def made_up_lanes(
    round: int = 1, members: int = 16, steps: int = 24, slots: int = 3, seed: int = 0, title: str = ""
) -> Lanes:
    """Seeds that are planted, blend, stay or go; better rounds keep more."""
    draw = np.random.default_rng((seed, round))
    stage = np.full((steps, members, slots), 1)
    alpha = np.zeros((steps, members, slots))
    blueprint = np.full((steps, members, slots), NO_BLUEPRINT)
    worth = np.full((steps, members, slots), float(UNMEASURED))
    op, op_slot = np.zeros((steps, members), int), np.zeros((steps, members), int)
    for n in range(members):
        for s in range(slots):
            _live(
                draw,
                round,
                stage[:, n, s],
                alpha[:, n, s],
                blueprint[:, n, s],
                worth[:, n, s],
                (op[:, n], op_slot[:, n], s),
            )
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
        "stage": stage, "alpha": 255 * alpha, "blueprint": blueprint, "contribution": worth, "op": op,
        "op_slot": op_slot, "succeeded": draw.random((steps, members)) < 0.85,
        "rolled_back": draw.random((steps, members)) < 0.002, "accuracy": accuracy, "parameters": parameters,
        "spent": spent, "seed_parameters": np.tile(_SIZES, (slots, 1)),
    }  # fmt: skip
    parts = [
        HostPart(
            f"segment {i + 1}",
            (f"Conv1d({8 if i else 1}, 8, kernel_size=(3,))", "GroupNorm(1, 8)", "ReLU()"),
            210,
            (8, 40 >> i),
        )
        for i in range(slots)
    ]
    return Lanes(
        round=round,
        slots=[f"r0c{i}" for i in range(slots)],
        parts=[*parts, HostPart("head", ("Linear(8, 10)",), 90, (10,))],
        stage_names=STAGES,
        op_names=OPS,
        blueprint_names=BLUEPRINTS,
        columns={name: np.asarray(column).astype(COLUMNS[name][0]) for name, column in columns.items()},
        title=title,
    )


def _live(draw, round, stage, alpha, blueprint, worth, ops) -> None:  # type: ignore[no-untyped-def]
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
            worth[span] = 100 * draw.normal(2.2 if good else -0.6, 0.8, len(worth[span]))
        t += length
