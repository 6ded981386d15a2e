"""One model of the user as the only member of an environment; `LivePopulation` implements `Bodies`.

The model is trained on its own loader, and seeds hang on its submodules. Rules, gates, controllers, governor
and final selection are those of the environments of built-in networks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from esper.growing.blocks import FEWEST_BLOCKS
from esper.growing.criterion import (
    BatchResult,
    Criterion,
    Evaluation,
    MetricSum,
    TargetKind,
    UserStep,
    count_tokens,
)
from esper.growing.data import count_samples, first_batch, no_more_batches, to_device
from esper.growing.estimate import SAMPLES, TOKENS, Estimate, estimate_targets
from esper.growing.live_model import LiveModel
from esper.growing.live_optimizer import LiveOptimizer
from esper.growing.progressive import GROW_AT, Progressive
from esper.growing.settings import GrowSettings
from esper.growing.slots import SlotNames, SlotSpec, find_slots, in_eval_mode
from esper.growing.surgery.probe import GrowthProbe, first_samples
from esper.lifecycle.actions import (
    FIRST_GROWTH,
    GROWTH_BLUEPRINTS,
    NUM_BLUEPRINTS,
    STYLE_BLEND,
    Blend,
    Blueprint,
    Style,
    has_gate,
    selectable_blueprints,
)
from esper.lifecycle.legality import blueprint_table
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from esper.lifecycle.stages import FORWARD_STAGES, Stage
from esper.population.blueprints import BlendGate, build_blueprint, parameter_count
from esper.population.config import PopulationConfig
from esper.population.data import Clock
from esper.population.metrics import SeedGradients, TrainMetrics, ValidationMetrics, gradient_health
from esper.simic.bodies import BlockScores
from esper.simic.config import EpisodeConfig, lifecycle_for
from esper.simic.costs import TRAINING_PASSES, ForwardCosts, Work
from esper.simic.environment import Environment, RuleSpec
from esper.utils.errors import UserError
from esper.utils.flops import flop_counter
from esper.utils.rows import check_like
from esper.utils.streams import SEED_MASK

OPTIMIZER = "optimizer."  # before the names of optimizer state in a snapshot
# Snapshots stay on the GPU where they take at most this share of the memory that training takes ...
SNAPSHOT_SHARE = 0.28
BEST_EPOCH_SHARE = 1 / 3  # ... with the weights of the best epoch, a third of a snapshot with moments
# Seeds of these attend to earlier positions only, and a user's model need not be causal.
CAUSAL_SEEDS = (Blueprint.ATTENTION, Blueprint.FLEX_ATTENTION)
_GATE = -1  # stands for a gate where a blueprint is asked for
_GAMMA = 0.995  # of the potential; no controller learns from the reward here
# In fewer steps the first blocks have hardly learned anything that is worth a copy.
FEWEST_STEPS = 100


class LiveEnvironment(Environment):
    """An environment of one member: the user's model."""

    bodies: LivePopulation

    def __init__(self, bodies: LivePopulation, epochs: int):
        settings = bodies.settings
        rules = RuleSpec(
            gamma=_GAMMA,
            seed=settings.seed,
            episode=EpisodeConfig(steps=epochs, clock="steps"),  # one decision before each epoch
            lifecycle=settings.lifecycle or lifecycle_for(epochs),
            best_epoch=True,
        )
        super().__init__(rules, bodies, math.log(bodies.criterion.classes))

    def _check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare the tensors of the model alone: the seeds are those of the saved state."""

        def own(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: value for name, value in named.items() if name.startswith("population.model.")}

        if len(tensors["population.folds"]) or self.bodies.live.folds:
            return  # `restore` gives the model the layers of the saved state first
        check_like(own(self.state_dict()), own(tensors), "the saved model", "give the same model")


class LivePopulation:
    """One member: a model, the seeds on it, its data, and the optimizer of both; see `Bodies`."""

    num_members = 1
    device = torch.device("cpu")  # of the tensors that it returns, wherever the model is
    replays = False

    def __init__(
        self,
        model: nn.Module,
        loaders: tuple[Iterable[Any], Iterable[Any]],
        settings: GrowSettings,
        device: torch.device,
        slots: SlotNames | None = None,
        step: UserStep | None = None,
        grows: bool = True,
    ):
        """Find the slots by a first pass, and check that model, data and functions fit.

        device: of the model. grows: whether clones and widenings are looked for. Raises a UserError for what
        does not fit.
        """
        self.model, self.settings, self.model_device = model, settings, device
        self.train_loader, self.val_loader = loaders
        rates = {"host_lr": settings.lr, "seed_lr": settings.lr}
        self.config = PopulationConfig(**{**rates, **settings.training})
        self.criterion = Criterion(settings, step)
        self.live = self._attach_slots(slots, grows)
        # In a model in train mode, submodules in eval mode were frozen by the user and stay so.
        if not model.training:
            model.train()
        self.slots, self.num_slots = self.live.slots, len(self.live.slots)  # in execution order
        self.topology, self.host_parameters = self.live.topology, self.live.host_parameters
        # For the names of all tensors: model.…, slot.0.seed.…, slot.0.gate.…
        self._modules = nn.ModuleDict({"model": model, "slot": nn.ModuleList(self.slots)})
        self.members = torch.zeros(1, dtype=torch.long)
        self.births = torch.zeros(1, dtype=torch.long)
        self.finished = torch.zeros(1, dtype=torch.bool)
        self.idle = False  # one member is never finished before its last step
        self.folding = torch.zeros(1, self.num_slots, dtype=torch.bool)
        self._allowed = torch.ones(NUM_BLUEPRINTS, dtype=torch.bool)
        self.optimizer = LiveOptimizer(model, settings, self.config)
        self.progressive: Progressive | None = None  # of a model that is grown into
        self._trained_share = 1.0  # of the whole model's FLOPs, in the latest epoch of training
        self.host_flops = self.live.flops
        self.batches = length_hint(self.train_loader)  # 0 where it is not known before the first epoch
        self.samples = (0, 0)  # of the latest epoch of training, of the latest validation
        self.stop: Callable[[], bool] = lambda: False  # whether somebody asked for an end
        self.interrupted = False  # whether an epoch was ended early
        self._validated = False  # whether `val` was read before
        self._evaluations: dict[tuple[Any, ...], Evaluation] = {}  # by alphas, until the weights change
        self._snapshot: dict[str, Tensor] | None = None  # the latest one, until anything changes
        # Counted for the first seed of each kind and size: to count all blueprints of a slot takes longer
        # than many steps of training.
        self._seed_flops = cache(_count_seed_flops)

    def _attach_slots(self, names: SlotNames | None, grows: bool) -> LiveModel:
        model, criterion, loaders = self.model, self.criterion, (self.train_loader, self.val_loader)
        train = first_batch("train", loaders[0])
        self.batch_samples = getattr(loaders[0], "batch_size", None) or count_samples(train)
        val = to_device(first_batch("val", loaders[1]), self.model_device)
        with self._autocast():  # so that slots have the dtypes of training
            specs = find_slots(model, lambda: criterion.check(model, "val", val), names)
        criterion.checks = False  # reading the values of targets would wait for the device in every step
        for loader, first in zip(loaders, (train, val), strict=True):
            criterion.check_classes(loader, first)
        few, self._few = self._take_few(to_device(train, self.model_device)), self._take_few(val)
        with in_eval_mode(model), torch.no_grad():
            criterion.check(model, "train", few)
        return LiveModel(model, specs, GrowthProbe(model, criterion, self._few, grows))

    def _take_few(self, batch: Any) -> Any:
        """Return the first samples of a batch, or all where they do not run alone: nodes without edges."""
        few = first_samples(batch)
        try:
            with in_eval_mode(self.model), torch.no_grad(), self._autocast():
                self.criterion(self.model, few)
        except Exception:  # whatever the user's model, loss or step raises
            return batch
        return few

    def grow_into(self, epochs: int, equal_compute: bool, asked: bool) -> tuple[int, list[str]]:
        """Skip a part of the model's blocks at first; return the number of epochs and remarks for the report.

        equal_compute: as many epochs as cost what `epochs` of the whole model cost. asked: also where growth
        is not expected to pay. Raises a UserError where it is not, and where model or data do not allow it.
        """
        most = self.settings.training.get("batches_per_epoch") or self.batches
        batches = min(self.batches or most, most)  # 0 where no length is known, which is refused below
        each = math.ceil(batches / self.settings.accumulate)
        steps = epochs * each
        if steps < FEWEST_STEPS:
            given = f"{steps}; give more epochs, or smaller batches" if steps else "an unknown number"
            raise UserError(f"growing into a model needs {FEWEST_STEPS} optimizer steps and has {given}")

        def run(model: nn.Module) -> Any:
            with self._autocast():
                result = self.criterion(model, self._few)
            return result.loss, result.outputs

        expected = self._estimate(epochs * batches)
        if expected.grow_at is None and not asked:
            hint = "; controller='into' grows all the same" if expected.blocks >= FEWEST_BLOCKS else ""
            raise UserError(expected.reason + hint)
        optimizer = type(self.optimizer.inner).__name__
        if "Adam" not in optimizer and not asked:  # with Muon it gained nothing: docs/handbook.md
            raise UserError(
                f"growth is ahead of plain training with AdamW, and was not found to be so with {optimizer}; "
                "controller='into' grows all the same"
            )
        law, seen = expected.law, expected.per_parameter
        grow_at = law.grow_at(seen, equal_compute) if 0 < seen <= law.most else GROW_AT
        # What was loaded from a checkpoint grows where it is asked for.
        options: dict[str, Any] = {"grow_at": grow_at, "example": run, "pretrained": False}
        grower = Progressive(self.model, self.optimizer.inner, steps, **options)
        saving = f"{100 * grower.saved:.0f} % fewer training FLOPs than without growth"
        if equal_compute:
            # n epochs of the grown model cost n · (1 − saved) epochs of the whole one.
            asked_for, epochs = epochs, round(epochs / (1.0 - grower.saved))
            grower.set_stage(len(grower.grow_steps))  # no block is skipped while another grower is made
            grower = Progressive(self.model, self.optimizer.inner, epochs * each, **options)
            more = round(100 * asked_for / (epochs * (1.0 - grower.saved)) - 100)
            cost = f"{abs(more)} % {'more' if more > 0 else 'less'}" if more else "as much"
            saving = f"{asked_for} epochs of the whole model cost {cost}"
        self.progressive = grower
        remark = (
            f"{grower.active} of {grower.blocks} blocks train for the first {grower.grow_steps[0]:,} of "
            f"{grower.total_steps:,} steps, then all of them, the new ones as copies: {saving}"
        )
        return epochs, [remark, *([expected.reason] if expected.advice == "take half of the depth" else [])]

    def _estimate(self, batches: int) -> Estimate:
        """Estimate what it saves to grow into the model, by the batches that its training sees."""
        batch = to_device(first_batch("val", self.val_loader), self.model_device)
        with in_eval_mode(self.model), torch.no_grad(), self._autocast():
            result = self.criterion(self.model, batch)
        samples = batches * self.batch_samples
        epochs = batches / (self.batches or batches)  # a stream without a length does not repeat
        flops = TRAINING_PASSES * self.host_flops * samples
        # Whole numbers that a loss of the user's reads as numbers are labels beside each other, no text.
        labels = self.criterion.kind is TargetKind.NUMBERS
        if not labels and (tokens := count_tokens(batch, result.targets)):
            return estimate_targets(self.model, samples * tokens / result.samples, flops, TOKENS, epochs)
        return estimate_targets(self.model, samples, flops, SAMPLES, epochs)

    @property
    def whole(self) -> bool:
        """Whether no block of the model is skipped, so that its weights are those of the user's model."""
        return self.progressive is None or self.progressive.whole

    # ---- growth ----------------------------------------------------------------------------------------

    def begin_episode(self, episode: int) -> None:
        """Keep the weights that the model was given with."""

    def germinate(self, where: Tensor, blueprint: Tensor) -> None:
        for k in _true_slots(where):
            # Python hashes numbers alike in every process, unlike texts.
            seed = hash((self.settings.seed, int(self.births), k)) & SEED_MASK
            self.live.plant(k, int(blueprint[0, k]), self.model_device, seed)
        self.births = self.births + where.any(dim=1).cpu()
        self._snapshot = None

    def prune(self, where: Tensor) -> None:
        for k in _true_slots(where):
            self.optimizer.remove_seed(k)
            self.live.clear(k)
            self._snapshot = None

    def fold(self, where: Tensor, style: Tensor) -> None:
        for k in _true_slots(where):
            self._fold_seed(k, STYLE_BLEND[Style(int(style[0, k]))])

    def growable(self) -> Tensor:
        table = blueprint_table(torch.device("cpu"), self.topology).repeat(1, self.num_slots, 1)
        if self.topology == "transformer":
            table[..., CAUSAL_SEEDS] = False
        for k in range(self.num_slots):
            table[0, k] &= not self.live.is_widened_elsewhere(k)
            for b in GROWTH_BLUEPRINTS:
                table[0, k, b] = self.live.can_grow(k, b)
        return table & self._allowed

    def limit_blueprints(self, allowed: Sequence[str] | None, scheduled: Sequence[Blueprint]) -> list[str]:
        """Allow only these blueprints, or all that fit; return remarks on scheduled ones that do not fit.

        Raises a UserError for limits that leave nothing to grow, and for a schedule that no slot can follow.
        """
        fitting = self._fitting()
        names = list(fitting if allowed is None else allowed)
        if not names or not set(names) <= set(fitting):
            known = ", ".join(fitting)
            raise UserError(f"blueprints are {names}; in a {self.topology} allowed are {known}, at least one")
        self._allowed = torch.tensor([b.name in names for b in Blueprint])
        fitting, why = self._fitting(), dict[str, str]()
        for b in (b for b in scheduled if b.name not in fitting):
            reasons = "; ".join(self.live.refusals(b)) or f"{b.name} is not for such a model"
            why[b.name] = f"which no slot of this model takes: {reasons}; a slot takes {', '.join(fitting)}"
        if why and len(why) == len(scheduled):
            raise UserError(f"the schedule asks for {', '.join(why)}, {next(iter(why.values()))}")
        return [f"{name} was asked for, {reason}" for name, reason in why.items()]

    def _fitting(self) -> list[str]:
        """Name the blueprints that some slot takes now."""
        fits = self.growable()[0].any(dim=0)
        return [b.name for b in Blueprint if fits[b]]

    def sync_slots(self, states: SlotStates) -> None:
        """Copy alpha, blend and requires_grad from `states` to the slots, and train what is to be trained."""
        for k, slot in enumerate(self.slots):
            stage = Stage(int(states.stage[0, k]))
            grows = slot.blueprint in GROWTH_BLUEPRINTS
            slot.blend = Blend.ADD if grows else STYLE_BLEND[Style(int(states.style[0, k]))]
            slot.alpha = float(states.alpha[0, k]) if stage in FORWARD_STAGES else 0.0
            if slot.seed is None:
                continue
            slot.requires_grad_(int(states.alpha_mode[0, k]) != AlphaMode.DOWN)
            if stage in FORWARD_STAGES or stage is Stage.TRAINING:
                self._snapshot = self._snapshot if k in self.optimizer.seeds else None
                self.optimizer.add_seed(k, slot.parameters())

    def _fold_seed(self, k: int, blend: Blend) -> None:
        """Make the seed of slot k part of the model, at alpha 1."""
        slot = self.slots[k]
        slot.blend, slot.alpha = Blend.ADD if slot.blueprint in GROWTH_BLUEPRINTS else blend, 1.0
        slot.requires_grad_(True)
        self.optimizer.add_seed(k, slot.parameters())
        self.optimizer.fold(k, self.live.fold(k))
        self.forget_measurements()

    # ---- training --------------------------------------------------------------------------------------

    def run_training(self, states: SlotStates, clock: Clock) -> TrainMetrics:
        """Train for one pass over the loader: the model with its blended seeds, and seeds in isolation.

        Where `stop` is true, the epoch ends at the next batch, and `interrupted` is set.
        """
        self.sync_slots(states)
        self.forget_measurements()
        isolated = _true_slots(states.stage == Stage.TRAINING)
        total = torch.zeros((), device=self.model_device)
        count = samples = 0
        shares = 0.0
        for batch in self._read_train():
            if self.stop():
                self.interrupted = True
                break
            progress = (clock.epoch + min(1.0, count / max(self.batches, 1))) / clock.epochs
            self.optimizer.set_rates(progress)
            result = self._backward(batch, count)
            shares += result.samples * (1.0 if self.progressive is None else self.progressive.share)
            total += result.loss.detach()
            for k in isolated:
                self._backward_isolated(k, batch)
            count, samples = count + 1, samples + result.samples
            if count % self.settings.accumulate == 0:
                self._step_optimizer()
        if not count and not self.interrupted:
            raise no_more_batches("train")
        if count % self.settings.accumulate:
            self._step_optimizer()  # with the gradients of the last, incomplete step
        self.batches, self.samples = max(count, 1), (samples, self.samples[1])
        self._trained_share = shares / max(samples, 1)
        gradients = torch.stack([slot.gradient_stats(self.model_device) for slot in self.slots])
        norm, vanishing, exploding = gradients.cpu().T.unsqueeze(1)  # of the latest batch, each [1, S]
        seeds = SeedGradients(norm, gradient_health(vanishing, exploding), vanishing, exploding)
        return TrainMetrics(loss=(total / max(count, 1)).cpu().view(1), seeds=seeds)

    def _read_train(self) -> Iterator[Any]:
        most = self.settings.training.get("batches_per_epoch")
        try:
            for batch in islice(self.train_loader, most):
                yield to_device(batch, self.model_device)
        except RuntimeError:
            if not self.stop():  # Ctrl-C ends the worker processes of a loader as well
                raise

    def _autocast(self) -> torch.autocast:
        enabled = self.config.precision == "bfloat16"
        return torch.autocast(self.model_device.type, torch.bfloat16, enabled=enabled)

    def _backward(self, batch: Any, index: int) -> BatchResult:
        """Add the gradients of a batch to those of its step."""
        if index % self.settings.accumulate == 0:
            self.optimizer.inner.zero_grad(set_to_none=True)
        with self._autocast():
            result = self.criterion(self.model, batch)
        if result.loss.requires_grad:
            (result.loss / self.settings.accumulate).backward()
        elif self.optimizer.host:  # a frozen model without a blended seed has nothing to train
            raise UserError("the loss depends on no trained weight; compute it from outputs without detach()")
        return result

    def _backward_isolated(self, k: int, batch: Any) -> None:
        """Add the gradients of the seed of slot k with its alpha at 1."""
        slot = self.slots[k]
        own = [p for p in slot.parameters() if p.requires_grad]
        others = [other for other in self.slots if other is not slot]
        # In eval mode: running statistics are updated in the model's own pass, and once for each batch.
        with in_eval_mode(self.model, *others), slot.at_alpha(1.0), self._autocast():
            loss = self.criterion(self.model, batch).loss
        # Not by backward(), which would add to the gradients of the model as well.
        for parameter, gradient in zip(own, torch.autograd.grad(loss, own, allow_unused=True), strict=True):
            if gradient is not None:
                gradient = gradient / self.settings.accumulate
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _step_optimizer(self) -> None:
        """Step the optimizer, and grow into the model."""
        self.optimizer.step()
        if self.progressive is not None and self.progressive.step():
            self._snapshot = None

    # ---- validation ------------------------------------------------------------------------------------

    def run_validation(
        self, states: SlotStates, ablate: bool = True, unfinished: bool = False
    ) -> ValidationMetrics:
        """Measure the model and, with `ablate`, each seed, in a pass each; `unfinished` changes nothing."""
        self.sync_slots(states)
        key = tuple((slot.blueprint, slot.alpha, slot.blend) for slot in self.slots)
        found = ValidationMetrics.unmeasured(1, self.num_slots, self.device)
        if key not in self._evaluations:
            self._evaluations = {key: self.evaluate()}
        own = self._evaluations[key]
        found.loss[0], found.accuracy[0] = own.loss, own.score
        isolated = _true_slots(states.stage == Stage.TRAINING)
        for k, slot in enumerate(self.slots if ablate else []):
            if slot.alpha > 0:
                with slot.at_alpha(0.0):
                    found.contribution[0, k] = 100.0 * (own.score - self.evaluate().score)
            elif slot.seed is not None and k in isolated:
                with slot.at_alpha(1.0):
                    found.shadow_gain[0, k] = 100.0 * (self.evaluate().score - own.score)
        return found

    def score_blocks(self, states: SlotStates, blocks: int) -> BlockScores:
        self.sync_slots(states)
        whole = self.evaluate(blocks).blocks
        contribution = torch.full((len(whole), 1, self.num_slots), math.nan)
        for k, slot in enumerate(self.slots):
            if slot.alpha > 0:
                with slot.at_alpha(0.0):
                    contribution[:, 0, k] = 100.0 * (whole - self.evaluate(blocks).blocks)
        return BlockScores(100.0 * whole.unsqueeze(1), contribution, self.samples[1])

    def evaluate(self, blocks: int = 1, retry: bool = True) -> Evaluation:
        """Run one pass over the validation data, scored in as many parts as there are blocks (and data).

        retry: read the loader again where Ctrl-C ended its worker processes.
        """
        metrics = MetricSum(self.criterion, blocks)
        most = self.settings.training.get("validation_samples")
        try:
            with in_eval_mode(self._modules), torch.no_grad():
                for batch in self.val_loader:
                    with self._autocast():
                        metrics.add(self.criterion(self.model, to_device(batch, self.model_device)))
                    if most is not None and metrics.samples >= most:  # a loader without a length may not end
                        break
        except RuntimeError:
            if not (retry and self.stop()):
                raise
            return self.evaluate(blocks, retry=False)
        if not metrics.batches:
            raise no_more_batches("val")
        self.samples = (self.samples[0], metrics.samples)
        result = metrics.result()
        self._check_score(result)
        return result

    def _check_score(self, result: Evaluation) -> None:
        """Refuse a score that is not finite before any training; later, warn of one."""
        before, self._validated = self._validated, True
        if math.isfinite(result.score) or not math.isfinite(result.loss):
            return  # where the loss is broken as well, the governor takes the training back
        source = "step" if self.criterion.step is not None else "the metric"
        message = f"{source} gives a score of {result.score} on the validation data, whose loss is finite"
        if not before:
            raise UserError(f"{message}; return a finite number, such as 0 where the score is not defined")
        warnings.warn(f"{message}; an epoch without a finite score is never the best", stacklevel=2)

    # ---- cost ------------------------------------------------------------------------------------------

    def parameter_counts(self, states: SlotStates) -> Tensor:
        return torch.tensor([self.live.count_model_parameters() + self.live.count_seed_parameters()])

    def seed_parameters(self) -> Tensor:
        table = torch.zeros(self.num_slots, NUM_BLUEPRINTS, dtype=torch.long)
        for k, (options, spec) in enumerate(zip(self.live.options, self.live.specs, strict=True)):
            for b in selectable_blueprints(spec.topology):
                table[k, b] = parameter_count(b, spec.topology, spec.width, spec.spatial_dims)
            for grown, size in options.parameters.items():
                table[k, grown] = size
        return table

    def gate_parameters(self) -> Tensor:
        return torch.tensor([spec.width + 1 for spec in self.live.specs])  # a weight for each channel, a bias

    def epoch_flops(self, states: SlotStates, work: Work, uses_metrics: Tensor | None = None) -> Tensor:
        if self.progressive is not None:  # no seeds, and everyone pays for the validation
            passes = TRAINING_PASSES * work.training * self._trained_share
            flops = self.host_flops * (passes + work.validation * self.progressive.share)
            return torch.tensor([flops], dtype=torch.float64)
        return self._forward_costs().epoch(states, self, work, uses_metrics)

    def relative_cost(self, states: SlotStates) -> Tensor:
        return self._forward_costs().relative(states, self)

    @property
    def forms(self) -> Tensor:
        """The blueprint in each slot, -1 where there is none.  # [1, S, 1]"""
        return torch.tensor([slot.blueprint for slot in self.slots]).view(1, -1, 1)

    def gated(self, states: SlotStates) -> Tensor:
        """Where a seed blends through a gate.  # [1, S, 1] bool"""
        return has_gate(states.style).unsqueeze(2) & (self.forms >= 0) & (self.forms < FIRST_GROWTH)

    def _forward_costs(self) -> ForwardCosts:
        """Count one sample through the model and its seeds.

        Hooks cannot begin a pass in the middle: to try another alpha costs a pass through the whole model.
        `ForwardCosts` charges what follows a slot, so that all of the model counts as behind the last one.
        """
        slots, specs, options = self.slots, self.live.specs, self.live.options
        parts = torch.zeros(len(slots), NUM_BLUEPRINTS, dtype=torch.float64)
        gates = torch.zeros(len(slots), dtype=torch.float64)
        trunk = torch.zeros(len(slots) + 1, dtype=torch.float64)
        trunk[-1] = self.live.flops
        for k, slot in enumerate(slots):
            if slot.seed is None:
                continue
            if slot.blueprint in GROWTH_BLUEPRINTS:
                parts[k, slot.blueprint] = options[k].flops.get(Blueprint(slot.blueprint), 0.0)
            else:
                parts[k, slot.blueprint] = self._seed_flops(slot.blueprint, specs[k])
                gates[k] = self._seed_flops(_GATE, specs[k])
        return ForwardCosts(trunk, parts, gates, self.host_flops)

    # ---- state -----------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of model, seeds and optimizer, by name. Views, not copies."""
        folds = torch.tensor([fold.code for fold in self.live.folds], dtype=torch.long).view(-1, 4)
        named = {"births": self.births, "folds": folds}
        if self.progressive is not None:
            named["stage"] = torch.tensor(self.progressive.stage)
            named["active"] = self.progressive.active_flags()
        for k, slot in enumerate(self.slots):
            if slot.seed is not None:
                named[f"slot.{k}.seed"] = torch.tensor([slot.blueprint, slot.folds_before])
                named[f"slot.{k}.trained"] = torch.tensor([k in self.optimizer.seeds])
        moments = self.optimizer.tensors(self._parameter_names())
        named |= {f"{OPTIMIZER}{name}": value for name, value in moments.items()}
        return named | self._module_tensors()

    def snapshot(self) -> dict[str, Tensor]:
        return self.keep({}, torch.tensor(True))

    def keep(self, saved: dict[str, Tensor], where: Tensor) -> dict[str, Tensor]:
        """Return a new snapshot, which overwrites the moments of the saved one, or that one.  # where [1]"""
        if not bool(where):
            return saved
        if self._snapshot is None:
            moments = {name: value for name, value in saved.items() if name.startswith(OPTIMIZER)}
            self._snapshot = _copy_tensors(self.tensors(), moments)
        return self._snapshot

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor], where: Tensor | None = None) -> None:
        """Return to a snapshot, of this process or of another."""
        if where is not None and not bool(where):
            return
        self.forget_measurements()
        self.births = saved["births"].clone()
        if self.progressive is not None:  # steps still count as done, so that a late stage comes at once
            self.progressive.set_stage(int(saved["stage"]))
            # Runs of versions before 0.5, whose copies stood behind their sources, saved no active blocks.
            active = saved.get("active", torch.empty(0))
            if not self.progressive.whole and not torch.equal(active, self.progressive.active_flags()):
                raise UserError("the run began with esper before 0.5, which skipped other blocks; use that")
        seeds = {k: saved[f"slot.{k}.seed"] for k in range(self.num_slots) if f"slot.{k}.seed" in saved}
        self._rebuild(saved["folds"].tolist(), {k: tuple(code.tolist()) for k, code in seeds.items()})
        for name, value in self._module_tensors().items():
            value.copy_(saved[name])
        for k, slot in enumerate(self.slots):
            trained = bool(saved.get(f"slot.{k}.trained", False))
            if k in self.optimizer.seeds and not trained:
                self.optimizer.remove_seed(k)
            if trained:
                self.optimizer.add_seed(k, slot.parameters())
        moments = {n.removeprefix(OPTIMIZER): value for n, value in saved.items() if n.startswith(OPTIMIZER)}
        self.optimizer.restore(self._parameter_names(), moments)

    def _rebuild(self, folds: list[list[int]], seeds: Mapping[int, tuple[int, ...]]) -> None:
        """Give the model these folds and seeds; weights are restored later.

        folds: as `Fold.code`; seeds: by slot, blueprint and the number of folds before it was planted. A seed
        depends on the layers of that time, so that everything is done again in its order.
        """
        living = {k: (s.blueprint, s.folds_before) for k, s in enumerate(self.slots) if s.seed is not None}
        if [fold.code for fold in self.live.folds] == folds and living == seeds:
            return
        self.live.reset()
        self.optimizer.reset()
        planted = [(k, blueprint, folds_before) for k, blueprint, _, folds_before in folds]
        planted += [(k, blueprint, folds_before) for k, (blueprint, folds_before) in seeds.items()]
        for n in range(len(folds) + 1):
            for k, blueprint, folds_before in planted:
                if folds_before == n:
                    self.live.plant(k, blueprint, self.model_device, 0)
            if n < len(folds):
                self._fold_seed(folds[n][0], Blend(folds[n][2]))

    def forget_measurements(self) -> None:
        """Drop what was cached of the present weights; to be called where they change."""
        self._evaluations, self._snapshot = {}, None

    def _parameter_names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._modules.named_parameters()}

    def _module_tensors(self) -> dict[str, Tensor]:
        # Buffers too that no state_dict holds: some models update them.
        named = (*self._modules.named_parameters(), *self._modules.named_buffers())
        return {name: value.detach() for name, value in named}

    def progress_tensors(self) -> dict[str, Tensor]:
        """Return the state that no rollback restores; raises a UserError if the optimizer cannot be saved."""
        self.optimizer.check_savable()
        steps_done = 0 if self.progressive is None else self.progressive.steps_done
        return {"data": torch.tensor([self.batches, *self.samples]), "steps_done": torch.tensor(steps_done)}

    def load_progress(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `progress_tensors` returned."""
        self.batches, trained, validated = (int(n) for n in saved["data"])
        self.samples = (trained, validated)
        if self.progressive is not None:
            self.progressive.steps_done = int(saved["steps_done"])

    def plain_model(self, states: SlotStates) -> nn.Module:
        """Return a plain copy of the model with the seeds of these states."""
        self.sync_slots(states)
        return self.live.plain_model()


def _true_slots(where: Tensor) -> list[int]:
    """List the slots where True.  # [1, S]"""
    return where[0].nonzero().flatten().tolist()


def _count_seed_flops(blueprint: int, spec: SlotSpec) -> float:
    """Count the FLOPs of a seed, or of a gate for _GATE, on one sample."""
    with torch.device("meta"):
        body: nn.Module = BlendGate(spec.width, spec.spatial_dims)
        if blueprint != _GATE:
            body = build_blueprint(blueprint, spec.topology, spec.width, spec.spatial_dims)
        with torch.no_grad(), flop_counter() as counter:
            body(torch.zeros(1, *spec.shape))
    return float(counter.get_total_flops())


def _copy_tensors(tensors: Mapping[str, Tensor], reusable: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors, into those of `reusable` that have the same name and form.

    Tensors of a GPU stay there if that takes little beside training, else the copies are in main memory.
    """
    home = _snapshot_device(tensors.values(), reusable.values())
    copies = {}
    for name, value in tensors.items():
        own, device = reusable.get(name), home if value.is_cuda else value.device
        if own is None or (own.shape, own.dtype, own.device) != (value.shape, value.dtype, device):
            own = torch.empty_like(value, device=device)
        copies[name] = own.copy_(value)
    return copies


def _snapshot_device(tensors: Collection[Tensor], before: Collection[Tensor]) -> torch.device:
    """Choose between GPU and main memory for copies of these tensors and of those of the best epoch."""
    device = next((value.device for value in tensors if value.is_cuda), None)
    if device is None:
        return torch.device("cpu")
    size, present = (sum(v.nbytes for v in values if v.is_cuda) for values in (tensors, before))
    trained = torch.cuda.max_memory_allocated(device) - present
    fits = (1 + BEST_EPOCH_SHARE) * size <= SNAPSHOT_SHARE * trained
    return device if fits else torch.device("cpu")
