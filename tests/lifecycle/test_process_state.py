"""Nothing here touches the process: every switch belongs to an object."""

from __future__ import annotations

import numpy as np
import torch

from esper.lifecycle.actions import Actions, Head, Op
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.engine import apply, tick
from esper.lifecycle.legality import Gate
from esper.lifecycle.slot_states import SlotEvidence, SlotRecord, SlotStates
from esper.lifecycle.stages import Stage
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import batch_obs_to_features
from tests.scenes import random_observation


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


def test_a_whole_step_leaves_the_process_as_it_was() -> None:
    observation = random_observation(np.random.default_rng(0), 4, 3)
    config = LifecycleConfig()
    before = process_state()
    compute_batch_masks(observation.slots)
    batch_obs_to_features(observation)
    tick(apply(observation.slots, Actions.wait(4), observation.evidence, config, "cnn").states, config)
    assert process_state() == before


def test_two_configs_live_side_by_side() -> None:
    held = SlotRecord(Stage.HOLDING, 1, alpha=1.0, alpha_target=1.0)
    states = SlotStates.from_records([[held]])
    evidence = SlotEvidence.unmeasured(1, 1).replace(contribution=torch.tensor([[0.2]]))
    lax, strict = LifecycleConfig(), LifecycleConfig(gates=GateConfig(mode="strict"))
    fossilize = Actions.of([{Head.OP: Op.FOSSILIZE}])
    for config, gate in ((lax, Gate.NONE), (strict, Gate.G5), (lax, Gate.NONE), (strict, Gate.G5)):
        assert apply(states, fossilize, evidence, config, "cnn").refused_by.item() == gate
