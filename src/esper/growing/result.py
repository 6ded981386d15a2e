"""What a user gets back: the grown model with its report, and ways to save it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from esper.growing.settings import STATIC
from esper.lifecycle.actions import GROWTH_BLUEPRINTS, STYLE_BLEND, Blend, Blueprint, Head, Op, Style
from esper.lifecycle.legality import Gate
from esper.lifecycle.stages import SEED_STAGES, Stage
from esper.population.blueprints import blueprint_factory
from esper.runs.files import write_atomically
from esper.runs.schema import Curve, SavedNetwork, to_json
from esper.simic.rollout import EpisodeRecord
from esper.utils.errors import UserError, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLENDS = {Blend.ADD: "added", Blend.MULTIPLY: "multiplied", Blend.GATE: "added through a gate"}
GROWN = "grown"  # the name of a run; that of its baseline is STATIC


@dataclass(frozen=True)
class Epoch:
    """One decision and the epoch that followed it."""

    epoch: int  # from 1 on
    decision: str  # in words
    train_loss: float
    val_loss: float
    score: float  # of validation
    parameters: int


@dataclass(frozen=True)
class Addition:
    """One seed that the model ended with."""

    slot: str  # the user's submodule after which it sits
    module: str  # its own name in the plain model; that of the slot where the model's own layers grew
    blueprint: str
    summary: str
    blend: str
    parameters: int
    contribution: float  # points by which the validation score falls if it is removed


@dataclass(frozen=True)
class Grown:
    """A grown model, and how it grew."""

    model: nn.Module  # plain, in eval mode, on the CPU
    record: EpisodeRecord  # of one member
    slot_names: tuple[str, ...]
    module_names: tuple[str, ...]  # what grew in a slot is called this in the plain model
    score_name: str
    topology: str
    epoch: int  # whose weights the model ended with, from 1 on
    asked: int = 0  # epochs that were asked for; 0 where it is not known
    plain_epochs: int = 0  # that plain training would take; `equal_compute` asks for more than these
    folded: tuple[str, ...] = ()  # seeds that became part of the model on the way, in words
    # By slot, how its clone or widening changes the model, and how many parameters that adds.
    widened: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    baseline: Grown | None = None  # the same model without growth, if asked for
    remarks: tuple[str, ...] = ()  # on what was asked for and is not there
    seconds: tuple[float, ...] = ()  # of each epoch with its validation
    grew: bool = False  # whether a seed was planted, or skipped blocks began

    def __repr__(self) -> str:
        score = f"validation {self.score_name} {float(self.record.accuracy[-1, 0]):.3f}"
        what = f"{type(self.model).__name__} of {self.parameters:,} parameters"
        return f"<Grown: {what}, {score} after {self._epochs}; report() says more>"

    @property
    def _epochs(self) -> str:
        return f"{self.record.num_steps} epoch{'s' * (self.record.num_steps != 1)}"

    @property
    def name(self) -> str:
        """What the model is called beside its baseline."""
        return GROWN if self.grew else "trained"

    @property
    def history(self) -> tuple[Epoch, ...]:
        """What was decided and measured, epoch by epoch."""
        record = self.record
        return tuple(
            Epoch(
                epoch=t + 1,
                decision=self._describe_decision(t),
                train_loss=float(record.training_loss[t, 0]),
                val_loss=float(record.loss[t + 1, 0]),
                score=float(record.accuracy[t + 1, 0]),
                parameters=int(record.parameters[t + 1, 0]),
            )
            for t in range(record.num_steps)
        )

    def _describe_decision(self, t: int) -> str:
        """Say in words what was decided in epoch t, and whether it was done."""
        record, names = self.record, self.slot_names
        planted = [
            f"{Blueprint(int(record.blueprint[t, 0, k])).name} after {name}"
            for k, name in enumerate(names)
            if record.germinated[t, 0, k]
        ]
        if planted:  # a schedule may plant several at once
            return f"planted {', '.join(planted)}"
        op, k = (int(record.choices[t, 0, head]) for head in (Head.OP, Head.SLOT))
        slot, after = names[k], Stage(int(record.stage[t, 0, k])).name
        if not record.succeeded[t, 0]:
            gate = Gate(int(record.refused_by[t, 0]))
            by = "" if gate is Gate.NONE else f" by gate {gate.name}"
            return f"asked for {Op(op).name} on the seed after {slot}, in {after}, and was refused{by}"
        words = {
            Op.WAIT: "waited",
            Op.SET_ALPHA_TARGET: f"gave the seed after {slot} another strength",
            Op.PRUNE: f"took out the seed after {slot}",
            Op.FOSSILIZE: f"fossilised the seed after {slot}",
            Op.ADVANCE: f"moved the seed after {slot} on to {after}",
        }
        return words[Op(op)]

    @property
    def added(self) -> tuple[Addition, ...]:
        """The seeds that the model ended with, in the order of its slots; each is at alpha 1."""
        kept = self.record.final_slots.stage[0] == Stage.FOSSILIZED
        return tuple(self._addition(k) for k in kept.nonzero().flatten().tolist())

    def _addition(self, k: int) -> Addition:
        slots = self.record.final_slots
        blueprint = Blueprint(int(slots.blueprint[0, k]))
        grows = blueprint in GROWTH_BLUEPRINTS
        blend = Blend.ADD if grows else STYLE_BLEND[Style(int(slots.style[0, k]))]
        if k in self.widened:
            summary, size = self.widened[k]
        else:
            factory = blueprint_factory(blueprint, self.topology)
            summary = (factory.__doc__ or factory.__name__).strip().splitlines()[0]
            size = int(self.record.seed_parameters[k, blueprint])
            size += int(self.record.gate_parameters[k]) if blend is Blend.GATE else 0
        return Addition(
            slot=self.slot_names[k],
            module=self.slot_names[k] if k in self.widened else self.module_names[k],
            blueprint=blueprint.name,
            summary=summary,
            blend=_BLENDS[blend],
            parameters=size,
            contribution=float(self.record.contribution[-1, 0, k]),
        )

    @property
    def host_parameters(self) -> int:
        """Trained parameters of the model as it was given."""
        return self.record.host_parameters

    @property
    def parameters(self) -> int:
        """Trained parameters of the model as it is now."""
        return int(self.record.parameters[-1, 0])

    def diff(self) -> str:
        """Return what was added where, with how many parameters, and what its removal would cost."""
        lines = [f"  {self.host_parameters:,} parameters as given"]
        for item in self.added:
            falls = f"{'falls' if item.contribution >= 0 else 'rises'} by {abs(item.contribution):.1f} points"
            removed = f"validation {self.score_name} {falls} if it is removed"
            size = f"{item.parameters:,} parameters"
            if Blueprint[item.blueprint] in GROWTH_BLUEPRINTS:
                lines.append(f"+ {item.summary} ({item.blueprint}), {size}, {removed}")
            else:
                kind = f"{item.blueprint} ({item.module}), {size}, {item.blend}"
                lines.append(f"+ after {item.slot}: {kind}, {removed}: {item.summary}")
        lines += [f"+ {line}" for line in self.folded]
        ending = "nothing was added" + (": these are all of its blocks" if self.grew_into else "")
        ending = f"= {self.parameters:,} parameters" if self.added or self.folded else ending
        return "\n".join([*lines, ending])

    def report(self) -> str:
        """Return a summary of the run, the additions and the decisions."""
        record = self.record
        first, last = float(record.accuracy[0, 0]), float(record.accuracy[-1, 0])
        planted, kept = int(record.germinated.sum()), len(self.added) + len(self.folded)
        rollbacks = int(record.panicked.sum())
        lines = [
            f"validation {self.score_name} {first:.3f} → {last:.3f} in {self._epochs}, with the weights of "
            f"epoch {self.epoch}"
        ]
        if planted:
            lines.append(f"seeds: {planted} planted, {kept} kept, {planted - kept} taken out again")
        lines += self._time_saved()
        if record.num_steps < self.asked:
            lines.append(f"it ended before its {self.asked} epochs were over")
        if rollbacks:
            lines.append(f"training broke {rollbacks} times and was taken back to its last good state")
        lines += self.verdicts()
        decisions = [f"epoch {e.epoch}: {e.decision}" for e in self.history if e.decision != "waited"]
        decisions += [
            f"epoch {t + 1}: training broke, and the seed after {self.slot_names[k]} was taken out"
            for t, k in np.argwhere(record.rolled_back[:, 0])
        ]
        return "\n".join([*lines, "", self.diff(), "", *decisions, *self._removed_at_end()]).rstrip()

    def _time_saved(self) -> list[str]:
        """Say how long it took beside the whole model, where a part of its blocks was skipped at first."""
        # A run that was stopped early has nothing to be compared with.
        stopped = self.record.num_steps < self.asked
        if not self.grew_into or stopped or len(self.seconds) != self.record.num_steps:
            return []
        took = f"it took {sum(self.seconds):.1f} s"
        if self.baseline is not None:
            return [f"{took}, and the same model without growth {sum(self.baseline.seconds):.1f} s"]
        flops = np.diff(self.record.spent[:, 0])
        whole = flops > 0.999 * flops.max()  # [T] epochs in which all blocks trained to the end
        plain = self.plain_epochs * float(np.median(np.array(self.seconds)[whole]))
        return [f"{took}; {self.plain_epochs} epochs of the whole model would have taken {plain:.1f} s"]

    @property
    def grew_into(self) -> bool:
        """Whether a part of the model's blocks was skipped at first, and began later."""
        return self.grew and not self.record.germinated.any()

    def _removed_at_end(self) -> list[str]:
        """Name the seeds of the last epoch, or of that of the weights, that were removed at the end."""
        record, lines = self.record, []
        for k, name in enumerate(self.slot_names):
            if int(record.final_slots.stage[0, k]) == Stage.FOSSILIZED:
                continue
            # The slots of the last epoch and, beside them, those of the epoch whose weights were taken.
            last, chosen = (
                Blueprint(int(record.blueprint[t, 0, k])).name
                if Stage(int(record.ticked_stage[t, 0, k])) in SEED_STAGES and not record.rolled_back[t, 0, k]
                else None
                for t in (record.num_steps - 1, self.epoch - 1)
            )
            if chosen is not None:
                lines.append(f"at the end: took out the {chosen} after {name}, which was not shown to help")
            elif last is not None:
                lines.append(f"at the end: left out the {last} after {name}, not there in epoch {self.epoch}")
        return lines

    def plot(self) -> Figure:
        """Draw the validation score against training FLOPs and against seconds, with that of a baseline."""
        require("matplotlib", "plot", "Grown.plot")
        from matplotlib.figure import Figure  # not pyplot, which would open windows

        figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        runs = {self.name: self, **({} if self.baseline is None else {"without growth": self.baseline})}
        for (name, run), line in zip(runs.items(), ("-", "--"), strict=False):
            score = run.record.accuracy[:, 0]
            left.plot(run.record.spent[:, 0], score, line, label=name)
            # Epochs of a run that was resumed from an older version were not timed.
            right.plot(np.cumsum([0.0, *run.seconds]), score[: len(run.seconds) + 1], line, label=name)
        left.set(xlabel="training FLOPs", ylabel=f"validation {self.score_name}")
        right.set(xlabel="seconds")
        left.legend()
        return figure

    def curves(self) -> list[Curve]:
        """Return score and cost of the run, and of the baseline where there is one, epoch by epoch."""
        own = self.curve_of(self.record, self.name)
        return [own] if self.baseline is None else [own, self.curve_of(self.baseline.record, STATIC)]

    def verdicts(self) -> list[str]:
        """Return the comparison with the baseline, if there is one, and the remarks; one sentence each."""
        if (other := self.baseline) is None:
            return list(self.remarks)
        if other.record is self.record:
            return ["nothing grew, so that this is its own baseline", *self.remarks]
        mine, theirs = float(self.record.accuracy[-1, 0]), float(other.record.accuracy[-1, 0])
        # Its epochs are a whole number, so that a short run costs more or less than the grown one.
        more = 100 * float(other.record.flops.mean() / self.record.flops.mean()) - 100
        cost = "the same" if abs(more) < 1.5 else f"{abs(more):.0f} % {'more' if more > 0 else 'fewer'}"
        verdict = (
            f"the same model without growth ({other.parameters:,} parameters) reached {theirs:.3f} at {cost} "
            f"training FLOPs, in {other._epochs}; growth against it: "
            f"{round(100 * (mine - theirs), 1) + 0.0:+.1f} points (one run each)"
        )
        return [verdict, *self.remarks]

    @staticmethod
    def curve_of(record: EpisodeRecord, name: str) -> Curve:
        """Return score and cost of a record of one member, epoch by epoch."""
        columns = (record.accuracy, record.parameters, record.spent)
        return Curve(name, *(column[:, 0].tolist() for column in columns))


# ---- saving --------------------------------------------------------------------------------------------


def save_archive(model: nn.Module, sample: Tensor | Sequence[Tensor], path: Path | str) -> Path:
    """Write a model as a torch.export archive for any batch size; torch alone loads it.

    sample: [B, *input_shape], or one such for each input. Read it back with
    `torch.export.load(path).module()`. Raises a UserError for fewer than two samples.
    """
    inputs = (sample,) if isinstance(sample, Tensor) else tuple(sample)
    for given in inputs:
        if given.ndim < 1 or given.shape[0] < 2:
            raise UserError(f"sample is {list(given.shape)}; give 2 inputs or more: the batch size is free")
    shapes = ({0: torch.export.Dim("batch", min=1)},) * len(inputs)
    program = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes)
    archive = io.BytesIO()
    torch.export.save(program, archive)
    write_atomically(Path(path), archive.getvalue())
    return Path(path)


def save_network(folder: Path, model: nn.Module, network: SavedNetwork, described: str) -> None:
    """Write the tensors of a model, what is known of it as JSON, and the same for people as Markdown."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    write_atomically(folder / "network.safetensors", save_tensors(tensors, {"format": "pt"}))
    write_atomically(folder / "network.md", described.encode())
    write_atomically(folder / "network.json", to_json(network).encode() + b"\n")
