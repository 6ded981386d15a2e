"""A controller of your own: `-C examples/own_controller.py:WidenOnPlateau`.

It decides for all members at once: every tensor has a row for each member, and nothing is read back from the
device. `masks` says what is legal; the environment refuses anything else.
"""

from __future__ import annotations

import torch

import esper
from esper.lifecycle.actions import Actions, AlphaTarget, Blueprint, Head, Op, Tempo
from esper.tamiyo.controller import Controller, EpisodeInfo
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tasks import load_task


class WidenOnPlateau(Controller):
    """Widen the first slot that allows it whenever validation accuracy has stopped rising."""

    uses_metrics = True  # members pay for the validations that it reads

    def begin(self, info: EpisodeInfo) -> None:
        """Start an episode; this one remembers nothing."""

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        history = observation.accuracy_history  # [N, 5], oldest first; NaN where nothing was measured yet
        plateau = history[:, -1] - history[:, -2] < 0.01  # [N]
        free = masks.slot_by_op[:, Op.GERMINATE]  # [N, S]
        ready = free.any(dim=1) & masks.blueprint[:, Blueprint.WIDEN_FULL] & plateau
        actions = Actions.wait(observation.num_members, ready.device)
        choices = {
            Head.OP: Op.GERMINATE,
            Head.BLUEPRINT: Blueprint.WIDEN_FULL,
            Head.TEMPO: Tempo.FAST,
            Head.ALPHA_TARGET: AlphaTarget.FULL,
        }
        for head, choice in choices.items():
            actions.choices[:, head] = torch.where(ready, int(choice), actions[head])
        actions.choices[:, Head.SLOT] = torch.where(ready, free.int().argmax(dim=1), 0)
        return actions


def main(epochs: int = 20) -> esper.Grown:
    """Let it decide for one model of your own."""
    digits = load_task("digits")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.ReLU(), torch.nn.Linear(4, 10)
    )
    grown = esper.grow(
        model,
        train=(digits.train.inputs, digits.train.targets),
        val=(digits.validation.inputs, digits.validation.targets),
        controller=WidenOnPlateau(),
        epochs=epochs,
        folds=2,
    )
    print(grown.report())
    return grown


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
