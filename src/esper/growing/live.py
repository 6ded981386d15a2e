"""One real model as a population of one: its own modules, its own loader, seeds on its submodules by hooks.

`LivePopulation` answers the questions that an environment asks of bodies (train for a while, validate with
these strengths, germinate, prune, go back), so that rules, gates, controllers, governor, ending and report
are those of every other growth.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from operator import length_hint
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.growing.batches import autocast, one_pass, ran_dry, to_device
from esper.growing.live_costs import LiveCosts
from esper.growing.live_optimizer import LiveOptimizer, Rates
from esper.growing.live_slots import LiveSlot
from esper.growing.live_state import OPTIMIZER, copied, put_back, tensors_of
from esper.growing.places import trained
from esper.growing.tally import Evaluation, Tally
from esper.growing.undoing import at_rest, in_eval_mode
from esper.growing.widening import Widening
from esper.lifecycle.actions import GROWTH_BLUEPRINTS, STYLE_BLEND, Blend, Style, has_gate
from esper.lifecycle.legality import blueprint_table
from esper.lifecycle.slot_states import NO_BLUEPRINT, AlphaMode, SlotStates
from esper.lifecycle.stages import HEARD_STAGES, Stage
from esper.population.config import PopulationConfig
from esper.population.data import Clock
from esper.population.gradients import SeedGradients, gradient_health
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.simic.bodies import BlockScores
from esper.simic.costs import Work
from esper.utils.errors import UserError

if TYPE_CHECKING:
    from esper.growing.live_environment import LiveModel

_DRAW = 0x7FFFFFFF


class LivePopulation:
    """The bodies of one member: a model, the seeds that hang on it, and the optimizer that moves both."""

    num_members = 1
    device = torch.device("cpu")  # of what it says about itself, wherever the model is
    replays = False

    def __init__(self, live: LiveModel, optimizer: torch.optim.Optimizer | None = None):
        """optimizer: the user's own, whose loop trains the model; without one it is trained here."""
        settings = live.settings
        self.model, self.judge, self.settings, self.place = live.model, live.judge, settings, live.device
        self.train_loader, self.val_loader = live.loaders
        if optimizer is None and not live.model.training:
            live.model.train()  # else submodules in eval mode were put there by the user, and stay there
        self.config = PopulationConfig(
            **{"host_lr": settings.lr, "seed_lr": settings.lr, **settings.training}
        )
        self.hooks, self.costs = live.hooks, LiveCosts(live.hooks)
        self.num_slots = len(live.hooks.slots)
        self.members = torch.zeros(1, dtype=torch.long)
        self.births = torch.zeros(1, dtype=torch.long)
        self.optimizer = LiveOptimizer(live.model, settings, self.config, optimizer)
        self.rates = Rates(settings.make_scheduler, self.config, self.optimizer.peak)
        self.batches = length_hint(self.train_loader)  # 0 where nobody knows before it was read
        self._known: dict[tuple[Any, ...], Evaluation] = {}  # by what is heard, until the weights move
        self._latest: dict[str, Tensor] | None = None  # the latest snapshot, until anything changes
        self.samples = (0, 0)  # trained on in the latest epoch, validated on
        self.stop: Callable[[], bool] = lambda: False  # whether somebody asked for an end
        self.out_of_time: Callable[[], bool] = lambda: False
        self._measured = False  # whether `val` was read before
        self.interrupted = False
        self.finished = torch.zeros(1, dtype=torch.bool)
        self.idle = False  # one member is never finished before its last step
        self.folding = torch.zeros(1, self.num_slots, dtype=torch.bool)
        self.reported: dict[str, float] = {}  # what the user measured of this epoch

    @property
    def slots(self) -> list[LiveSlot]:
        """The places where seeds may live, in order."""
        return self.hooks.slots

    @property
    def topology(self) -> str:
        return self.hooks.topology

    @property
    def host_parameters(self) -> int:
        return self.hooks.host_parameters

    @property
    def host_flops(self) -> float:
        return self.costs.host

    @property
    def forms(self) -> Tensor:
        """Which blueprint stands in each slot, -1 where none does.  # [1, S, 1]"""
        found = [NO_BLUEPRINT if slot.seed is None else slot.blueprint for slot in self.slots]
        return torch.tensor(found).view(1, -1, 1)

    def gated(self, states: SlotStates) -> Tensor:
        """Where a seed blends through a gate.  # [1, S, 1] bool"""
        plain = (self.forms >= 0) & (self.forms < min(GROWTH_BLUEPRINTS))
        return has_gate(states.style).unsqueeze(2) & plain

    def growable(self) -> Tensor:
        """The blueprints that fit each slot now.  # [1, S, blueprints] bool"""
        kind = blueprint_table(torch.device("cpu"), self.hooks.topology)
        fits = kind.repeat(1, self.num_slots, 1)
        for k in range(self.num_slots):
            fits[0, k] &= not self.hooks.disturbed(k)
            for b in GROWTH_BLUEPRINTS:
                fits[0, k, b] = self.hooks.fits(k, b)
        return fits

    def fold(self, where: Tensor, style: Tensor) -> None:
        """The fossils where True become part of the model, and their slots are empty.  # [1, S] each"""
        for k in where[0].nonzero().flatten().tolist():
            self.fold_seed(k, STYLE_BLEND[Style(int(style[0, k]))])

    def fold_seed(self, k: int, blend: Blend) -> None:
        """Make the seed of slot k part of the model, at full strength; the optimizer goes on with it."""
        slot = self.slots[k]
        slot.blend, slot.strength = Blend.ADD if slot.blueprint in GROWTH_BLUEPRINTS else blend, 1.0
        slot.requires_grad_(True)
        self.train_seed(k)
        self.optimizer.fold(k, self.hooks.fold(k))
        self.optimizer.host = trained(self.model)
        self.forget_measurements()

    def unfold_seed(self) -> None:
        """Take the latest fold back; the weights of before are the caller's to restore."""
        self.optimizer.unfold(self.hooks.unfold())
        self.optimizer.host = trained(self.model)
        self.forget_measurements()

    # ---- birth and death -------------------------------------------------------------------------------

    def begin_episode(self, episode: int) -> None:
        """The model begins with the weights that it was given."""

    def germinate(self, where: Tensor, blueprint: Tensor) -> None:
        """Plant seeds in the slots where True.  # where, blueprint [1, S]"""
        for k in where[0].nonzero().flatten().tolist():
            draw = hash((self.settings.seed, int(self.births), k)) & _DRAW
            self.hooks.plant(k, int(blueprint[0, k]), self.place, draw)
        self.births = self.births + where.any(dim=1).cpu()
        self._latest = None

    def prune(self, where: Tensor) -> None:
        """End the seeds in the slots where True; the optimizer forgets them.  # where [1, S]"""
        for k in where[0].nonzero().flatten().tolist():
            self.end_seed(k)

    def follow(self, states: SlotStates) -> None:
        """Strengths and ways of blending as the states say; what is being raised or heard is trained."""
        for k, slot in enumerate(self.slots):
            stage = Stage(int(states.stage[0, k]))
            grows = slot.blueprint in GROWTH_BLUEPRINTS
            slot.blend = Blend.ADD if grows else STYLE_BLEND[Style(int(states.style[0, k]))]
            slot.strength = float(states.alpha[0, k]) if stage in HEARD_STAGES else 0.0
            if slot.seed is None:
                continue
            slot.requires_grad_(int(states.alpha_mode[0, k]) != AlphaMode.DOWN)
            if stage in HEARD_STAGES or (self.optimizer.owned and stage is Stage.TRAINING):
                self._latest = self._latest if k in self.optimizer.seeds else None
                self.train_seed(k)

    def train_seed(self, k: int) -> None:
        """Let the optimizer train the seed of slot k from now on."""
        slot = self.slots[k]
        beside = slot.seed.neighbours() if isinstance(slot.seed, Widening) else None
        self.optimizer.take_in(k, slot.parameters(), beside)

    def end_seed(self, k: int) -> None:
        """Slot k is empty, and the optimizer forgets what was in it."""
        self.optimizer.let_go(k)
        self.hooks.clear(k)
        self._latest = None

    # ---- training --------------------------------------------------------------------------------------

    def run_training(self, states: SlotStates, clock: Clock) -> TrainMetrics:
        """One pass over the loader: the model and the seeds it hears together, seeds in isolation beside it.

        Where `stop` or `out_of_time` says so, the epoch ends at the next batch, and `interrupted` is set.
        """
        self.follow(states)
        self.forget_measurements()
        alone = [k for k in range(self.num_slots) if int(states.stage[0, k]) == Stage.TRAINING]
        total = torch.zeros((), device=self.place)
        shadow = torch.zeros(self.num_slots, device=self.place)
        host_norm = torch.zeros((), device=self.place)
        count = samples = 0
        for batch in self._epoch():
            if self.stop() or self.out_of_time():
                self.interrupted = True
                break
            self._set_rate(clock, count)
            judged = self._backward(batch, count)
            total += judged.loss.detach()
            for k in alone:
                shadow[k] += self._train_alone(k, batch)
            count, samples = count + 1, samples + judged.samples
            if count % self.settings.accumulate == 0:
                host_norm = self._move()
        if not count and not self.interrupted:
            raise ran_dry("train")
        if count % self.settings.accumulate:
            host_norm = self._move()  # what was added up of the last, incomplete step
        self.batches, self.samples = max(count, 1), (samples, self.samples[1])
        isolated = torch.tensor([k in alone for k in range(self.num_slots)])
        return TrainMetrics(
            loss=(total / max(count, 1)).cpu().view(1),
            shadow_loss=(shadow.cpu() / max(count, 1)).masked_fill(~isolated, math.nan).view(1, -1),
            seeds=self.gradients(host_norm),
        )

    def train_isolated(self, states: SlotStates) -> TrainMetrics:
        """One pass over the loader for the seeds that the model does not hear; nothing else moves.

        The gradients that the user's own latest backward pass left are measured first.
        """
        self.follow(states)
        self.forget_measurements()
        norms = [p.grad.norm() for p in self.optimizer.host if p.grad is not None]
        host_norm = torch.stack(norms).norm() if norms else torch.zeros((), device=self.place)
        losses = torch.full((1, self.num_slots), math.nan)
        for k in range(self.num_slots):
            if int(states.stage[0, k]) == Stage.TRAINING:
                losses[0, k] = self._pass_alone(k)
        unknown = torch.zeros(1)  # the loss of the user's own epoch is the user's
        return TrainMetrics(unknown, losses, self.gradients(host_norm))

    def _pass_alone(self, k: int) -> float:
        slot = self.slots[k]
        rule = self.optimizer.raise_alone(k, slot)
        total, count = torch.zeros((), device=self.place), 0
        for batch in self._epoch():
            rule.zero_grad(set_to_none=True)
            total += self._train_alone(k, batch)
            nn.utils.clip_grad_norm_(slot.parameters(), self.config.clip_norm)
            rule.step()
            count += 1
        return float(total) / max(count, 1)

    def _epoch(self) -> Iterator[Any]:
        try:
            for batch in one_pass(
                "train", self.train_loader, self.settings.training.get("batches_per_epoch")
            ):
                yield to_device(batch, self.place)
        except RuntimeError:
            if not self.stop():  # Ctrl-C ends the worker processes of a loader as well
                raise

    def _set_rate(self, clock: Clock, index: int) -> None:
        done = (clock.epoch + min(1.0, index / max(self.batches, 1))) / clock.epochs
        self.optimizer.set_share(self.rates.share(done))

    def _autocast(self) -> torch.autocast:
        return autocast(self.place, self.config.precision)

    def _backward(self, batch: Any, index: int) -> Any:
        if index % self.settings.accumulate == 0:
            self.optimizer.rule.zero_grad(set_to_none=True)
        with self._autocast():
            judged = self.judge(self.model, batch)
        if judged.loss.requires_grad:
            (judged.loss / self.settings.accumulate).backward()
        elif self.optimizer.host:  # a frozen model that hears no seed has nothing to learn
            raise UserError(
                "the loss depends on no weight that is trained; compute it from the model's outputs, without "
                "detach()"
            )
        return judged

    def _train_alone(self, k: int, batch: Any) -> Tensor:
        """Gradients of the loss that the model would have with the seed of slot k, for it alone.  # → []"""
        slot = self.slots[k]
        own = [p for p in slot.parameters() if p.requires_grad]
        if self.model.training:
            slot.copy_modes(self.hooks.modules[k])
        else:  # a user's own loop may call `step` in eval mode, which says nothing about training
            slot.train()
        # Running statistics and dropout belong to the model's own pass.
        with in_eval_mode(self.model), slot.at_strength(1.0, alone=True), self._autocast():
            loss = self.judge(self.model, batch).loss
        for parameter, gradient in zip(own, torch.autograd.grad(loss, own, allow_unused=True), strict=True):
            if gradient is not None:
                gradient = gradient / self.settings.accumulate
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss.detach()

    def _move(self) -> Tensor:
        """One step of the optimizer; the norm of the model's gradient.  # → []"""
        norm = self.optimizer.clip()
        self.optimizer.rule.step()
        self.rates.step()
        return norm

    def gradients(self, host_norm: Tensor) -> SeedGradients:
        """The health of the gradients that the latest backward pass left in each seed.  # each [1, S]"""
        rows = [slot.gradient(host_norm, self.hooks.host_parameters) for slot in self.slots]
        norm, vanishing, exploding, ratio = torch.stack(rows).cpu().T.unsqueeze(1)  # each [1, S]
        return SeedGradients(norm, gradient_health(vanishing, exploding), vanishing, exploding, ratio)

    # ---- validation ------------------------------------------------------------------------------------

    def run_validation(
        self, states: SlotStates, ablate: bool = True, unfinished: bool = False
    ) -> ValidationMetrics:
        """Loss and score of the model, and how the score falls without each seed: one pass over `val` each.

        What the user reported of this epoch is not measured again; without a seed to measure, `val` is then
        not read at all. `unfinished` says nothing here: there is one member.
        """
        self.follow(states)
        heard = tuple((slot.blueprint, slot.strength, slot.blend) for slot in self.slots)
        reported, self.reported = self.reported, {}
        found = ValidationMetrics.unmeasured(1, self.num_slots, self.device)
        measured = [
            k
            for k, slot in enumerate(self.slots if ablate else [])
            if slot.strength > 0 or (slot.seed is not None and int(states.stage[0, k]) == Stage.TRAINING)
        ]
        if not measured and len(reported) == 2:
            found.loss[0], found.accuracy[0] = reported["val_loss"], reported["val_accuracy"]
            return found
        if heard not in self._known:
            self._known = {heard: self.evaluate()}
        own = self._known[heard]
        found.loss[0] = reported.get("val_loss", own.loss)
        found.accuracy[0] = reported.get("val_accuracy", own.score)
        for k in measured:
            slot = self.slots[k]
            if slot.strength > 0:
                with slot.at_strength(0.0):
                    found.contribution[0, k] = 100.0 * (own.score - self.evaluate().score)
            else:
                with slot.at_strength(1.0):
                    found.shadow_gain[0, k] = 100.0 * (self.evaluate().score - own.score)
        return found

    def score_blocks(self, states: SlotStates, blocks: int) -> BlockScores:
        """The score on each part of the validation data, and what it loses there without each heard seed."""
        self.follow(states)
        whole = self.evaluate(blocks).blocks
        worth = torch.full((len(whole), 1, self.num_slots), math.nan)
        for k, slot in enumerate(self.slots):
            if slot.strength > 0:
                with slot.at_strength(0.0):
                    worth[:, 0, k] = 100.0 * (whole - self.evaluate(blocks).blocks)
        return BlockScores(100.0 * whole.unsqueeze(1), worth)

    def evaluate(self, blocks: int = 0) -> Evaluation:
        """One pass over the validation data, in as many parts as there are blocks (and data)."""
        try:
            return self._evaluated(blocks)
        except RuntimeError:
            if not self.stop():
                raise
            return self._evaluated(blocks)  # Ctrl-C ended the workers of the loader: read it anew

    def _evaluated(self, blocks: int) -> Evaluation:
        tally = Tally(self.judge, max(blocks, 1))
        most = self.settings.training.get("validation_samples")
        with at_rest(self.model):
            for batch in one_pass("val", self.val_loader):
                with self._autocast():
                    tally.add(self.judge(self.model, to_device(batch, self.place)))
                if most is not None and tally.samples >= most:  # a loader without a length may not end
                    break
        if not tally.batches:
            raise ran_dry("val")
        self.samples = (self.samples[0], tally.samples)
        result = tally.result()
        self._check_score(result)
        return result

    def _check_score(self, result: Evaluation) -> None:
        """Refuse a score that is not finite before any training; later, warn of one."""
        before, self._measured = self._measured, True
        if math.isfinite(result.score) or not math.isfinite(result.loss):
            return  # where the loss is broken as well, the governor takes the training back
        whose = "step" if self.judge.step is not None else "the metric"
        said = f"{whose} gives a score of {result.score} on the validation data, whose loss is finite"
        if not before:
            raise UserError(f"{said}; return a finite number, such as 0 where the score is not defined")
        warnings.warn(f"{said}; an epoch without a finite score is never the best", stacklevel=2)

    # ---- counting, going back --------------------------------------------------------------------------

    def parameter_counts(self, states: SlotStates) -> Tensor:
        """Trained parameters of the model and of the seeds that it holds.  # [1]"""
        return torch.tensor([self.hooks.model_parameters() + self.hooks.parameters()])

    def seed_parameters(self) -> Tensor:
        return self.hooks.seed_parameters()

    def gate_parameters(self) -> Tensor:
        return self.hooks.gate_parameters()

    def epoch_flops(self, states: SlotStates, work: Work, looks: Tensor | None = None) -> Tensor:
        return self.costs.epoch(states, self, work, looks)

    def relative_cost(self, states: SlotStates) -> Tensor:
        return self.costs.relative(states, self)

    def tensors(self) -> dict[str, Tensor]:
        """All that the bodies are, as plain tensors: see `live_state.tensors_of`. Views, not copies."""
        return tensors_of(self)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of `tensors`, from which `restore` goes back. One that is still true is not made again."""
        return self._copied({})

    def keep(self, saved: dict[str, Tensor], where: Tensor) -> dict[str, Tensor]:
        """A new snapshot where True, else the saved one.  # where [1]

        The optimizer's moments, most of a snapshot, are written over those of the saved one.
        """
        moments = {name: value for name, value in saved.items() if name.startswith(OPTIMIZER)}
        return self._copied(moments) if bool(where) else saved

    def _copied(self, room: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A snapshot, written into tensors of the same name and shape where there are such."""
        if self._latest is None or not self.optimizer.owned:  # a user's loop moves weights unseen
            self._latest = copied(self.tensors(), room)
        return self._latest

    def restore(self, saved: Mapping[str, Tensor], where: Tensor | None = None) -> None:
        """Go back to a snapshot: the weights, the seeds that lived then, and the optimizer's moments."""
        if where is None or bool(where):
            self.forget_measurements()
            put_back(self, saved)

    def forget_measurements(self) -> None:
        """What was measured and saved is no longer true."""
        self._known, self._latest = {}, None

    def plain_model(self, states: SlotStates) -> nn.Module:
        """A plain copy of the model with the seeds that the states hold."""
        self.follow(states)
        return self.hooks.plain_model()
