from __future__ import annotations

from typing import Any

import pytest

from esper.tamiyo.config import STUDY, differences

TRAINED = STUDY.model_copy(update={"blueprints": ("clone", "widen_full")})
INSIDE = TRAINED.model_copy(
    update={
        "minibatches": (768, 768),
        "learning_rate": (0.01, 0.01),
        "hosts": {"resmlp": {"width": (32, 32), "hidden": (8, 8), "depth": (2, 2)}},
    }
)


def resmlp(**sizes: float) -> dict[str, Any]:
    options = {"width": 32, "hidden": 8, "depth": 2} | sizes
    return {"hosts": {"resmlp": {name: (size, size) for name, size in options.items()}}}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"minibatches": (192, 192)},
        {"minibatches": (3072, 3072)},
        {"minibatches": (192 * (1 - 1e-9), 3072 * (1 + 1e-9))},  # quotients of FLOPs are rounded
        {"learning_rate": (0.005, 0.04)},
        {"hosts": {"gpt": {"width": (32, 32), "heads": (4, 4), "expansion": (2, 2), "depth": (1, 1)}}},
    ],
)
def test_the_limits_themselves_are_inside(change: dict[str, Any]) -> None:
    assert differences(TRAINED, INSIDE.model_copy(update=change)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"clock": "steps"}, "episode.clock is steps (trained with compute)"),
        ({"minibatches": (191, 191)}, "minibatches of the bare host is 191 (trained with 192 to 3,072)"),
        ({"minibatches": (3073, 3073)}, "minibatches of the bare host is 3,073 (trained with 192 to 3,072)"),
        ({"minibatches": (100, 200)}, "is 100 to 200 (trained"),
        ({"batch_size": (64, 64)}, "population.batch_size is 64 (trained with 128)"),
        ({"learning_rate": (0.041, 0.041)}, "population.host_lr is 0.041 (trained with 0.005 to 0.04)"),
        ({"schedules": ("one_cycle",)}, "population.schedule is one_cycle (trained with flat)"),
        ({"optimizer": "sgd"}, "population.optimizer is sgd (trained with adamw)"),
        ({"seed_rate": (3, 3)}, "population.seed_lr / population.host_lr is 3 (trained with 1)"),
        ({"blueprints": ("clone",)}, "lifecycle.block_blueprints is clone (trained with clone, widen_full)"),
        ({"hosts": {"cnn": {}}}, "the host is cnn (trained with gpt, resmlp, resnet)"),
        (resmlp(width=12), "host.width is 12 (trained with 32)"),
        (resmlp(hidden=16), "host.hidden is 16 (trained with 8)"),
        (resmlp(depth=3), "host.depth is 3 (trained with 2)"),
    ],
)
def test_what_lies_outside_is_said(change: dict[str, Any], said: str) -> None:
    (found,) = differences(TRAINED, INSIDE.model_copy(update=change))
    assert said in found
