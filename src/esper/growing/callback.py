"""Growth for people who keep their own training loop.

    grower = esper.Grower(model, optimiser, train=loader, val=val_loader, epochs=40)
    for epoch in range(40):
        for x, y in loader:
            ...                                  # train grower.model as you always did
        grower.step({"val_loss": 0.41, "val_accuracy": 0.87})
    plain = grower.finish()

`grower.model` shares the layers and the parameters of the model that was given, so the loop, the optimiser
and its schedule stay as they are. A seed that still learns in isolation is trained inside `step`, on `train`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from esper.foundation.errors import UserError
from esper.growing.budget import Limited, Prices
from esper.growing.controllers import make_controller
from esper.growing.cutting import cut
from esper.growing.data import GivenSplit, read_data
from esper.growing.live import LiveSlot, LiveSlots
from esper.growing.objectives import choose_goal
from esper.growing.plain import assemble, joined, plain_graft
from esper.growing.settings import settings_of
from esper.lifecycle.actions import Actions, Blueprint, Head, Op
from esper.lifecycle.engine import apply, tick
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.population import TrainMetrics, ValidationMetrics
from esper.simic.deciding import BLOCKS, at_full_strength, decide_seeds
from esper.simic.environment import NO_OP
from esper.simic.signals import Signals, update_evidence
from esper.tamiyo.controller import Controller, Scene
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.observation import Observation

METRICS = ("val_loss", "val_accuracy")
SETTINGS = ("objective", "loss", "metric", "blueprints", "lr", "seed", "topology", "lifecycle")
TRAINING_SETTINGS = ("batch_size", "weight_decay", "validation_samples")  # of seeds in isolation, and of val


class Grower:
    """Watches a model that somebody trains, and grows it: one `step` after every epoch."""

    def __init__(
        self,
        model: nn.Module,
        optimiser: Optimizer,
        train: Any,
        val: Any = None,
        slots: Sequence[str | int] | None = None,
        controller: str | Controller = "heuristic",
        epochs: int = 30,
        budget: int | None = None,
        **settings: Any,
    ):
        self.settings = settings_of(settings, (*SETTINGS, *TRAINING_SETTINGS))
        data = read_data(train, val, self.settings.seed, self.settings.training.get("validation_samples"))
        self._pieces = cut(model, data.sample, slots, self.settings.topology)
        goal, self._data = choose_goal(data, self._pieces.outputs(data.train.inputs[:256]), self.settings)
        self._recipe = self.settings.population(len(data.train), len(data.validation), data.batch_size)
        self._draw = torch.Generator().manual_seed(self.settings.seed)
        self.epochs, self.epoch, self._planted = epochs, 0, 0
        self._objective, self._given = goal.objective, model
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        host = self._pieces.host
        self._live = LiveSlots(host, optimiser, self._device, self.settings.seed)
        self.model = joined(model, self._pieces, dict(enumerate(self._live.slots)))
        self.rules = self.settings.rules(epochs)
        decider = make_controller(controller, self.rules.gates, torch.device("cpu"))
        self._prices = Prices.of(host, torch.device("cpu"), self.settings.blueprints, self._pieces.causal)
        self._controller = Limited(decider, self._prices, budget)
        self._controller.begin(
            Scene(torch.zeros(1, dtype=torch.long), host.num_slots, self.settings.seed, torch.device("cpu"))
        )
        self.states = SlotStates.empty(1, host.num_slots)
        self._evidence = SlotEvidence.unmeasured(1, host.num_slots)
        self._signals = Signals.blank(1, torch.device("cpu"))
        self._host_parameters = max(1, host.num_parameters)
        self._last_op, self._last_succeeded = torch.full((1,), NO_OP), torch.ones(1, dtype=torch.bool)
        self._alone: dict[int, AdamW] = {}  # the optimisers of seeds in isolation, by slot

    @property
    def slot_names(self) -> tuple[str, ...]:
        return self._pieces.slot_names

    def step(self, metrics: Mapping[str, float] | None = None) -> str:
        """An epoch of the user's training is over: measure, decide, grow. Returns what was done, in words.

        metrics: val_loss and val_accuracy (a score in 0..1) as the user measures them; measured here on `val`
        where they are left out.
        """
        given = self._checked(metrics or {})
        was_training = self.model.training
        shadow_loss, host_norm = self._train_isolated()
        self.model.eval()
        validation = self._measure(given)
        self.model.train(was_training)
        gradients = self._live.gradients(host_norm, self._host_parameters)
        training = TrainMetrics(validation.loss, shadow_loss, torch.tensor([host_norm]), gradients)
        self._evidence = update_evidence(self._evidence, self.states, training, validation)
        self._signals = self._signals.update(validation.loss, validation.accuracy)
        self.epoch += 1
        return self._decide(validation)

    def finish(self) -> nn.Module:
        """The grown model, plain: the user's layers and the seeds that earned their place, on the CPU.

        Every living seed is decided by the test of `esper.simic.deciding` and is from then on either at
        full strength or gone.
        """
        self._decide_all()
        tensors = [*self._given.named_parameters(), *self._given.named_buffers()]
        weights = {name: tensor.detach().cpu() for name, tensor in tensors}
        grafts = {
            k: plain_graft(copy.deepcopy(slot.graft()).cpu(), self._pieces.host.spatial_dims)
            for k, slot in enumerate(self._live.slots)
            if slot.seed is not None and slot.strength > 0
        }
        return assemble(self._pieces, weights, grafts)

    # ---- measuring -------------------------------------------------------------------------------------

    def _checked(self, metrics: Mapping[str, float]) -> dict[str, float]:
        unknown = sorted(set(metrics) - set(METRICS))
        if unknown:
            raise UserError(f"metrics name {', '.join(unknown)}; allowed are {', '.join(METRICS)}")
        values = {name: float(value) for name, value in metrics.items()}
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise UserError(
                f"{bad[0]} is {values[bad[0]]}: training has broken; lower the learning rate, or go back to "
                "a checkpoint before you step"
            )
        return values

    def _measure(self, given: Mapping[str, float]) -> ValidationMetrics:
        """Loss and score as they are, and what each seed is worth.  # [1], [1, S]"""
        loss, score = self._evaluate(self._data.validation)
        contribution, shadow = ([math.nan] * len(self._live.slots) for _ in range(2))
        for k, slot in enumerate(self._live.slots):
            if slot.strength > 0:
                with slot.at(0.0):
                    contribution[k] = 100.0 * (score - self._evaluate(self._data.validation)[1])
            elif self._in_isolation(k):
                with slot.at(1.0):
                    shadow[k] = 100.0 * (self._evaluate(self._data.validation)[1] - score)
        unknown = torch.full((1, len(self._live.slots)), math.nan)
        return ValidationMetrics(
            loss=torch.tensor([given.get("val_loss", loss)]),
            accuracy=torch.tensor([given.get("val_accuracy", score)]),
            contribution=torch.tensor([contribution]),
            shadow_gain=torch.tensor([shadow]),
            interaction=unknown,
            rows=1,
        )

    def _evaluate(self, split: GivenSplit) -> tuple[float, float]:
        """Loss and score over the whole split."""
        outputs, targets = self._outputs(split), split.targets.to(self._device)
        loss, score = (
            float(function(outputs.unsqueeze(0), targets.unsqueeze(0)))
            for function in (self._objective.loss, self._objective.score)
        )
        return loss, score

    @torch.no_grad()
    def _outputs(self, split: GivenSplit) -> Tensor:
        parts = torch.arange(len(split)).split(self._recipe.validation_batch)
        return torch.cat([self.model(self._batch(split, index)[0]) for index in parts])

    def _decide_all(self) -> None:
        """Keep the seeds that earn their place, at full strength, and take out the others."""
        split, slots = self._data.validation, self._live.slots
        targets, count = split.targets.to(self._device), min(BLOCKS, len(split))

        def block_scores() -> Tensor:
            outputs = self._outputs(split)
            pairs = [(outputs[None, k::count], targets[None, k::count]) for k in range(count)]
            return torch.cat([self._objective.score(*pair).cpu() for pair in pairs])  # [blocks]

        def measure(kept: Tensor) -> Tensor:
            worth = torch.full((count, 1, len(slots)), math.nan)
            with ExitStack() as stack:
                for slot, stays in zip(slots, kept[0].tolist(), strict=True):
                    stack.enter_context(slot.at(float(stays)))
                whole = block_scores()
                for k in kept[0].nonzero().flatten().tolist():
                    with slots[k].at(0.0):
                        worth[:, 0, k] = 100.0 * (whole - block_scores())
            return worth

        was_training = self.model.training
        self.model.eval()
        decision = decide_seeds(measure, holds_seed(self.states), torch.tensor([self._planted]))
        self.model.train(was_training)
        self._live.update(
            at_full_strength(self.states, decision.kept), [False] * len(slots), (~decision.kept)[0].tolist()
        )
        self.states = at_full_strength(self.states, decision.kept)

    def _batch(self, split: GivenSplit, index: Tensor) -> tuple[Tensor, Tensor]:
        return split.inputs[index].to(self._device), split.targets[index].to(self._device)

    # ---- growing ---------------------------------------------------------------------------------------

    def _in_isolation(self, k: int) -> bool:
        return int(self.states.stage[0, k]) == Stage.TRAINING

    def _train_isolated(self) -> tuple[Tensor, float]:
        """One pass over the training data for each seed that the model does not hear; nothing else moves."""
        host_norm = _norm(self._given)
        losses = torch.full((1, len(self._live.slots)), math.nan)
        for k, slot in enumerate(self._live.slots):
            if self._in_isolation(k):
                losses[0, k] = self._train_alone(k, slot)
        return losses, host_norm

    def _train_alone(self, k: int, slot: LiveSlot) -> float:
        if k not in self._alone:
            recipe = self._recipe
            self._alone[k] = AdamW(slot.parameters(), recipe.seed_lr, weight_decay=recipe.weight_decay)
        order = torch.randperm(len(self._data.train), generator=self._draw)
        total, count = 0.0, 0
        self.model.eval()  # running statistics and dropout belong to the user's own epochs
        with slot.at(1.0):
            for index in order.split(self._recipe.batch_size):
                x, y = self._batch(self._data.train, index)
                loss = self._objective.loss(self.model(x).unsqueeze(0), y.unsqueeze(0)).sum()
                own = list(slot.parameters())
                for parameter, gradient in zip(
                    own, torch.autograd.grad(loss, own, allow_unused=True), strict=True
                ):
                    parameter.grad = gradient
                self._alone[k].step()
                total, count = total + float(loss.detach()), count + 1
        return total / count

    def _decide(self, validation: ValidationMetrics) -> str:
        observation = Observation(
            progress=torch.tensor([min(1.0, self.epoch / self.epochs)]),
            val_loss=validation.loss,
            val_accuracy=validation.accuracy,
            loss_history=self._signals.loss_history,
            accuracy_history=self._signals.accuracy_history,
            parameter_ratio=1.0 + self._prices.spent(self.states) / self._host_parameters,
            last_succeeded=self._last_succeeded,
            last_op=self._last_op,
            slots=self.states,
            evidence=self._evidence,
        )
        topology = self._pieces.host.topology
        left = self.epochs - self.epoch
        masks = compute_batch_masks(
            self.states, None, self.rules, topology, evidence=self._evidence, steps_left=left
        )
        actions = self._controller.decide(observation, masks, self.epoch - 1)
        outcome = apply(self.states, actions, self._evidence, self.rules, topology, left)
        ticked = tick(outcome.states, self.rules)
        ended = outcome.pruned | ticked.pruned
        self.states = ticked.states
        self._planted += int(outcome.germinated.sum())
        self._evidence = self._evidence.forget(ended | outcome.germinated)
        self._live.update(self.states, outcome.germinated[0].tolist(), ended[0].tolist())
        self._alone = {k: rule for k, rule in self._alone.items() if self._in_isolation(k)}
        self._last_op, self._last_succeeded = actions[Head.OP], outcome.succeeded
        return self._told(actions) if bool(outcome.succeeded[0]) else "tried and was refused"

    def _told(self, actions: Actions) -> str:
        slot = self.slot_names[int(actions[Head.SLOT][0])]
        op, blueprint = Op(int(actions[Head.OP][0])), Blueprint(int(actions[Head.BLUEPRINT][0]))
        words = {Op.WAIT: "waited", Op.GERMINATE: f"planted {blueprint.name} after {slot}"}
        return words.get(op, f"{op.name.lower()} after {slot}")


def _norm(model: nn.Module) -> float:
    """Of the gradients that the user's latest backward pass left."""
    squares = [float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(squares))
