"""How much of what growth will earn can be foreseen: what any critic could hope to explain.

    python -m studies.foresight --family tables --members 256 --episodes 4
    python -m studies.foresight                      the table of what has been found

The controller of the package and ungrown twins live through the same episodes of made tasks. A boosted
regression, far more patient than a critic that learns on the way, then predicts the returns to go of members
whose tasks it was not fitted on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import GroupKFold, cross_val_predict

from esper.controllers import PRETRAINED, load_controller
from esper.foundation.errors import UserError
from esper.lifecycle.actions import Actions
from esper.simic.baseline import returns_to_go
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import Doubles, play
from esper.tamiyo.blocks import Blocks
from esper.tamiyo.controller import Controller, Scene
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.observation import Observation
from esper.tamiyo.scripted import Static
from esper.telemetry.files import write_atomically
from studies.command_line import existing_device, run
from studies.distribution import FAMILIES, TASKS_PER_FAMILY, Family
from studies.setting import Setting, tidy
from studies.tables import markdown
from studies.training import WORLD_SEED, world_of

RESULTS = Path("studies/results/foresight.json")
FIRST_EPISODE = 1000  # none that a controller was trained on
FOLDS = 4


@dataclass(frozen=True)
class Foresight:
    """Shares of variance that a regression explains on tasks that it was not fitted on."""

    family: str
    trajectories: int
    by_the_twin: float  # of plain returns, by the return of the ungrown twin: no fit at all
    plain: float  # of plain returns, from what the controller sees
    beyond: float  # of what lies beyond the twin, from what the controller sees
    beyond_with_twin: float  # the same, with what the twin looks like and has earned by then in view


@dataclass(frozen=True)
class Lives:
    """What members and their twins showed before every step, and earned in it."""

    features: Doubles  # [T, n, F]
    twin_features: Doubles  # [T, n, F]
    rewards: Doubles  # [T, n]
    twin_rewards: Doubles  # [T, n]


class Witness:
    """Decides as a controller does, and keeps what it was shown."""

    def __init__(self, controller: Controller):
        self.controller = controller

    @property
    def looks(self) -> bool:
        return self.controller.looks

    def begin(self, scene: Scene) -> None:
        self.controller.begin(scene)
        self.seen: list[Doubles] = []

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions | list[Actions]:
        parts = [part.flatten(1).double() for part in batch_obs_to_features(observation)]
        self.seen.append(torch.cat(parts, dim=1).cpu().numpy())
        return self.controller.decide(observation, masks, step)


def watch(environment: GrowthEnvironment, blocks: Blocks, episode: int) -> Lives:
    """One episode; `blocks` are the twins and the controller, each with a witness."""
    record = play(environment, blocks, episode)
    twins, ours = blocks.spans(environment.num_members).values()
    seen = [np.stack(witness.seen) for witness in blocks.controllers.values() if isinstance(witness, Witness)]
    return Lives(seen[1], seen[0], record.reward[:, ours], record.reward[:, twins])


def foresee(family: str, lives: Sequence[Lives], members: Sequence[int], gamma: float) -> Foresight:
    """Fit on some tasks, predict on the others; every step of every life is a sample."""
    plain = np.stack([returns_to_go(life.rewards, gamma) for life in lives])  # [E, T, n]
    twin = np.stack([returns_to_go(life.twin_rewards, gamma) for life in lives])
    earned = np.stack([np.cumsum(life.rewards - life.twin_rewards, axis=0) for life in lives])
    before = np.concatenate([np.zeros_like(earned[:, :1]), earned[:, :-1]], axis=1)
    steps = np.broadcast_to(np.arange(plain.shape[1])[None, :, None], plain.shape)
    tasks = np.broadcast_to(np.asarray(members) % TASKS_PER_FAMILY, plain.shape)
    features = np.stack([life.features for life in lives])  # [E, T, n, F]
    own = np.concatenate((features, steps[..., None]), axis=-1)
    gaps = features - np.stack([life.twin_features for life in lives])
    both = np.concatenate((own, gaps, before[..., None]), axis=-1)
    return Foresight(
        family=family,
        trajectories=len(lives) * len(members),
        by_the_twin=explained(plain, twin),
        plain=explained(plain, predicted(own, plain, tasks)),
        beyond=explained(plain - twin, predicted(own, plain - twin, tasks)),
        beyond_with_twin=explained(plain - twin, predicted(both, plain - twin, tasks)),
    )


def predicted(inputs: Doubles, targets: Doubles, groups: Doubles) -> Doubles:
    """For every sample, by a regression that was fitted on other groups.  # [..., F], [...], [...] → [...]"""
    model = HistGradientBoostingRegressor(max_iter=150, learning_rate=0.08, max_leaf_nodes=15)
    samples, wanted = inputs.reshape(targets.size, -1), targets.reshape(-1)
    folds = GroupKFold(FOLDS)
    found: Doubles = cross_val_predict(model, samples, wanted, groups=groups.reshape(-1), cv=folds)
    return found.reshape(targets.shape)


def explained(targets: Doubles, predictions: Doubles) -> float:
    return round(float(1 - (targets - predictions).var() / targets.var()), 3)


def study(family: Family, members: int, episodes: int, setting: Setting) -> Foresight:
    ids = torch.arange(members)
    blocks = Blocks({"twins": Witness(Static()), "controller": Witness(load_controller(PRETRAINED))})
    spec = replace(world_of(family, setting, members), members=blocks.members(ids))
    environment = GrowthEnvironment(spec)
    lives = []
    for episode in range(episodes):
        lives.append(watch(environment, blocks, FIRST_EPISODE + episode))
        print(f"{family.name}: episode {episode + 1} of {episodes}", flush=True)
    del environment
    tidy()
    return foresee(family.name, lives, ids.tolist(), spec.gamma)


COLUMNS = {
    "family": "made tasks",
    "trajectories": "lives",
    "by_the_twin": "of the return, by the twin's",
    "plain": "of the return, by a regression",
    "beyond": "of what lies beyond the twin, by a regression",
    "beyond_with_twin": "the same with the twin in view",
}


def table(found: Sequence[Foresight]) -> str:
    return markdown(list(COLUMNS.values()), [[str(asdict(row)[name]) for name in COLUMNS] for row in found])


def read(path: Path) -> dict[str, Foresight]:
    rows = json.loads(path.read_text()) if path.exists() else []
    return {row["family"]: Foresight(**row) for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", choices=[f.name for f in FAMILIES], default=[])
    parser.add_argument("--members", type=int, default=96)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--device", type=existing_device, default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.family and (args.members < FOLDS or args.episodes < 1):
        raise UserError(
            f"--members {args.members} --episodes {args.episodes} are too few to fit on some tasks and "
            f"judge on others; give at least {FOLDS} members and one episode"
        )
    setting = Setting(device=args.device, seed=WORLD_SEED)
    for family in FAMILIES:
        if family.name in args.family:
            found = study(family, args.members, args.episodes, setting)
            rows = read(args.out) | {family.name: found}
            text = json.dumps([asdict(row) for row in rows.values()], indent=1) + "\n"
            write_atomically(args.out, text.encode())
    print(table(list(read(args.out).values())))


if __name__ == "__main__":
    run(main)
