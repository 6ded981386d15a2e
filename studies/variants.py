"""The controllers that a study trains: Tamiyo as she is, and with one thing taken away.

A variant is `studies/tamiyo.yaml` with some settings changed, so that `esper train -c studies/tamiyo.yaml
--set learner.memory=false` trains one alone. None changes the world: all of them learn side by side.
"""

from __future__ import annotations

from esper.config import RunConfig, load_config
from studies.setting import RECIPE

MAIN = "main"
VARIANTS: dict[str, tuple[str, ...]] = {
    MAIN: (),
    "no_memory": ("learner.memory=false",),
    "no_shadow_gain": ("learner.shadow_gain=false",),
    "sparse_reward": ("reward.mode=sparse",),
    "no_causal_masks": ("learner.credit=all",),
    "no_patience": ("learner.patience=0",),
    "no_twin": ("reward.control_variate=false",),
    "readers_average": ("ppo.head_average=readers",),
}

# Settings of the learner to choose from: `--agents main probe_slow probe_fast ...` compares them in one run.
PROBES: dict[str, tuple[str, ...]] = {
    "probe_slow": ("ppo.learning_rate=0.0015",),
    "probe_fast": ("ppo.learning_rate=0.006",),
    "probe_readers_fast": ("ppo.head_average=readers", "ppo.learning_rate=0.006"),
    "probe_far": ("ppo.target_kl=0.3", "ppo.epochs=16"),
    "probe_curious": ("ppo.entropy_start=0.03", "ppo.entropy_end=0.01"),
    "probe_short": ("ppo.lam=0.95",),
}
KNOWN = VARIANTS | PROBES


def variant_of(name: str) -> str:
    """The variant of an agent: `no_memory-0` → `no_memory`."""
    return name.rpartition("-")[0]


def config_of(name: str) -> RunConfig:
    """The settings of an agent by its name, VARIANT-SEED; the seed is that of its first weights."""
    variant, _, seed = name.rpartition("-")
    return load_config(RECIPE, overrides=[*KNOWN[variant], f"seed={seed}"])
