"""Nothing here touches the process: every switch belongs to an object."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.scenes import random_observation
from esper.lifecycle.actions import Actions, Head, Op
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.engine import apply, tick
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.gates import Gate
from esper.lifecycle.slot_states import SlotRecord, SlotStates
from esper.lifecycle.stages import Stage
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import batch_obs_to_features

ROOMS = Path(__file__).parents[2] / "src" / "esper"
SWITCHES = re.compile(
    r"set_default_(dtype|device|validate_args)|set_num_threads|use_deterministic_algorithms|manual_seed_all"
    r"|set_grad_enabled|set_float32_matmul_precision|torch\.backends\.[\w.]+ *=[^=]|os\.environ\[.*\] *=[^=]"
)


def process_state() -> dict[str, object]:
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "validate": torch.distributions.Distribution._validate_args,
        "random": torch.get_rng_state().tolist(),
    }


def test_trap_45_a_whole_step_leaves_the_process_as_it_was() -> None:
    observation = random_observation(np.random.default_rng(0), 4, 3)
    config = LifecycleConfig()
    before = process_state()
    compute_batch_masks(observation.slots)
    batch_obs_to_features(observation)
    tick(apply(observation.slots, Actions.wait(4), observation.evidence, config, "cnn").states, config)
    assert process_state() == before


def test_trap_45_two_configs_live_side_by_side() -> None:
    held = SlotRecord(Stage.HOLDING, 1, alpha=1.0, alpha_target=1.0)
    states = SlotStates.from_records([[held]])
    evidence = SlotEvidence.unmeasured(1, 1).replace(contribution=torch.tensor([[0.2]]))
    lax, strict = LifecycleConfig(), LifecycleConfig(gates=GateConfig(mode="strict"))
    fossilize = Actions.of([{Head.OP: Op.FOSSILIZE}])
    for config, gate in ((lax, Gate.NONE), (strict, Gate.G5), (lax, Gate.NONE), (strict, Gate.G5)):
        assert apply(states, fossilize, evidence, config, "cnn").refused_by.item() == gate


@pytest.mark.parametrize("room", ["lifecycle", "tamiyo"])
def test_trap_45_no_line_of_these_rooms_flips_a_process_wide_switch(room: str) -> None:
    files = sorted((ROOMS / room).rglob("*.py"))
    assert files
    found = [f"{f.name}: {m.group()}" for f in files for m in SWITCHES.finditer(f.read_text())]
    assert found == []
