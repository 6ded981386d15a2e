"""What a user gets back: the grown model, its history, a report, a picture and a diff of the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from esper.foundation.statistics import mean_interval
from esper.lifecycle.actions import GROWTH_BLUEPRINTS, STYLE_BLEND, Blend, Blueprint, Head, Op, Style
from esper.lifecycle.gates import Gate
from esper.lifecycle.stages import SEED_STAGES, Stage
from esper.population.blueprints import blueprint_entry
from esper.simic.episode_record import EpisodeRecord
from esper.telemetry.schema import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLENDS = {Blend.ADD: "added", Blend.MULTIPLY: "multiplied", Blend.GATE: "added through a gate"}
GROWN, STATIC, WIDER = "grown", "static", "wider"  # the runs that one call may ask for
_MEASURED_AGAINST = {STATIC: "the same model without growth", WIDER: "a wider model without growth"}


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
    """A grown model and the story of it."""

    models: tuple[nn.Module, ...] = field(repr=False)  # one for each member, each plain
    record: EpisodeRecord = field(repr=False)
    slot_names: tuple[str, ...]
    module_names: tuple[str, ...]  # what grew in a slot is called this in the plain model
    score_name: str
    topology: str
    epochs: tuple[int, ...]  # whose weights each member ended with, from 1 on
    asked: int = 0  # epochs that were asked for; 0 where nobody said
    folded: tuple[str, ...] = ()  # seeds that became part of the model on the way, in words
    # By slot, what its seed changes in the model's own layers, and how many parameters that adds.
    widened: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    engine: str = "rows"
    reason: str = ""  # why that engine
    baseline: Grown | None = field(default=None, repr=False)  # the same model without growth, if asked for
    control: Grown | None = field(default=None, repr=False)  # a wider one without growth, if asked for
    remarks: tuple[str, ...] = ()  # on what was asked for and is not there

    @property
    def best(self) -> int:
        """The member with the best validation score at the end."""
        return int(np.nanargmax(np.nan_to_num(self.record.accuracy[-1], nan=-np.inf)))

    @property
    def model(self) -> nn.Module:
        """The best member: a plain module, in eval mode, on the CPU."""
        return self.models[self.best]

    @property
    def history(self) -> tuple[Epoch, ...]:
        """What was decided and seen, epoch by epoch, for the best member."""
        record, m = self.record, self.best
        return tuple(
            Epoch(
                epoch=t + 1,
                decision=self._decision(t, m),
                train_loss=float(record.training_loss[t, m]),
                val_loss=float(record.loss[t + 1, m]),
                score=float(record.accuracy[t + 1, m]),
                parameters=int(record.parameters[t + 1, m]),
            )
            for t in range(record.num_steps)
        )

    @property
    def added(self) -> tuple[Addition, ...]:
        """The seeds that the best member ended with, in the order of its slots; each is at full strength."""
        kept = self.record.final_slots.stage[self.best] == Stage.FOSSILIZED
        return tuple(self._addition(k) for k in kept.nonzero().flatten().tolist())

    def _addition(self, k: int) -> Addition:
        slots, m = self.record.final_slots[self.best], self.best
        blueprint = Blueprint(int(slots.blueprint[0, k]))
        blend = STYLE_BLEND[Style(int(slots.style[0, k]))]
        if blueprint in GROWTH_BLUEPRINTS:
            blend = Blend.ADD
        if k in self.widened:
            summary, size = self.widened[k]
        else:
            summary, size = (
                blueprint_entry(blueprint, self.topology).summary,
                int(self.record.seed_parameters[k, blueprint]),
            )
            size += int(self.record.gate_parameters[k]) if blend is Blend.GATE else 0
        return Addition(
            slot=self.slot_names[k],
            module=self.slot_names[k] if k in self.widened else self.module_names[k],
            blueprint=blueprint.name,
            summary=summary,
            blend=_BLENDS[blend],
            parameters=size,
            contribution=float(self.record.contribution[-1, m, k]),
        )

    @property
    def host_parameters(self) -> int:
        """Trained parameters of the model as it was given."""
        return self.record.host_parameters

    def diff(self) -> str:
        """What was added where, with how many parameters, and what its removal would cost."""
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
        total = int(self.record.parameters[-1, self.best])
        ending = f"= {total:,} parameters" if self.added or self.folded else "nothing was added"
        return "\n".join([*lines, ending])

    def report(self) -> str:
        """The story in a few lines."""
        record, m = self.record, self.best
        first, last = float(record.accuracy[0, m]), float(record.accuracy[-1, m])
        planted, kept = int(record.germinated[:, m].sum()), len(self.added) + len(self.folded)
        rollbacks = int(record.panicked[:, m].sum())
        lines = [
            f"validation {self.score_name} {first:.3f} → {last:.3f} in {record.num_steps} epochs, with the "
            f"weights of epoch {self.epochs[m]}",
            f"seeds: {planted} planted, {kept} kept, {planted - kept} taken out again",
        ]
        if record.num_steps < self.asked:
            lines.append(f"it ended before its {self.asked} epochs were over")
        if self.engine == "live":
            lines.append(f"the live engine grew it: {self.reason}")
        if rollbacks:
            lines.append(f"training broke {rollbacks} times and was taken back to its last good state")
        if len(self.models) > 1:
            lines.append(f"the best of {len(self.models)} members (number {m}) was kept")
        lines += self.verdicts()
        decisions = [f"epoch {e.epoch}: {e.decision}" for e in self.history if e.decision != "waited"]
        decisions += [
            f"epoch {t + 1}: training broke, and the seed after {self.slot_names[k]} was taken out"
            for t, k in np.argwhere(record.rolled_back[:, m])
        ]
        return "\n".join([*lines, "", self.diff(), "", *decisions, *self._taken_out()]).rstrip()

    def _taken_out(self) -> list[str]:
        """The seeds that lived in the last epoch, or in that of the weights, and that the end took out."""
        record, m = self.record, self.best
        epoch, lines = self.epochs[m], []
        for k, name in enumerate(self.slot_names):
            if int(record.final_slots.stage[m, k]) == Stage.FOSSILIZED:
                continue
            # The slots of the last epoch and, beside them, those of the epoch whose weights were taken.
            last, chosen = (
                Blueprint(int(record.blueprint[t, m, k])).name
                if Stage(int(record.ticked_stage[t, m, k])) in SEED_STAGES and not record.rolled_back[t, m, k]
                else None
                for t in (record.num_steps - 1, epoch - 1)
            )
            if chosen is not None:
                lines.append(f"at the end: took out the {chosen} after {name}, which was not shown to help")
            elif last is not None:
                lines.append(
                    f"at the end: left out the {last} after {name}, which epoch {epoch} did not have"
                )
        return lines

    def curves(self) -> list[Curve]:
        """The course of the best member, and of the best of whatever it is measured against."""
        return [run.curve_of(run.record, name) for name, run in self._runs().items()]

    def verdicts(self) -> list[str]:
        """What came of the comparison, one sentence for each that was asked for."""
        verdicts = [self._verdict(name, run) for name, run in self._runs().items() if run is not self]
        return [*verdicts, *self.remarks]

    def _runs(self) -> dict[str, Grown]:
        others = {STATIC: self.baseline, WIDER: self.control}
        return {GROWN: self, **{name: run for name, run in others.items() if run is not None}}

    def _verdict(self, name: str, run: Grown) -> str:
        size = int(run.record.parameters[-1, run.best])
        mine, theirs = self.record.accuracy[-1], run.record.accuracy[-1]
        mean, half = mean_interval((100 * (mine - theirs)).tolist())
        apart = f"{mean:+.1f} ± {half:.1f} points over {len(mine)} members"
        if len(mine) == 1:
            apart = f"{mean:+.1f} points (one run each)"
        return (
            f"{_MEASURED_AGAINST[name]} ({size:,} parameters) reached {float(theirs[run.best]):.3f} at the "
            f"same training FLOPs, in {run.record.num_steps} epochs; growth against it: {apart}"
        )

    @staticmethod
    def curve_of(record: EpisodeRecord, name: str) -> Curve:
        """The course of the member that is best at the end of a record."""
        best = int(np.nanargmax(np.nan_to_num(record.accuracy[-1], nan=-np.inf)))
        columns = (record.accuracy, record.parameters, record.spent)
        return Curve(name, *(column[:, best].tolist() for column in columns))

    def _decision(self, t: int, m: int) -> str:
        record, planted = self.record, self._planted(t, m)
        if planted:
            return f"planted {', '.join(planted)}"
        asked = record.choices[t, m]
        op, slot = Op(int(asked[Head.OP])), self.slot_names[int(asked[Head.SLOT])]
        after = Stage(int(record.stage[t, m, asked[Head.SLOT]])).name
        if not record.succeeded[t, m]:
            gate = Gate(int(record.refused_by[t, m]))
            by = "" if gate is Gate.NONE else f" by gate {gate.name}"
            return f"asked for {op.name} on the seed after {slot}, in {after}, and was refused{by}"
        words = {
            Op.WAIT: "waited",
            Op.SET_ALPHA_TARGET: f"gave the seed after {slot} another strength",
            Op.PRUNE: f"took out the seed after {slot}",
            Op.FOSSILIZE: f"fossilised the seed after {slot}",
            Op.ADVANCE: f"moved the seed after {slot} on to {after}",
        }
        return words[op]

    def _planted(self, t: int, m: int) -> list[str]:
        """The seeds that began in a step, in words; a schedule may plant several at once."""
        return [
            f"{Blueprint(int(self.record.blueprint[t, m, k])).name} after {self.slot_names[k]}"
            for k in np.flatnonzero(self.record.germinated[t, m])
        ]

    def plot(self) -> Figure:
        """The validation score and the number of parameters of the best member, and of what it is measured
        against: over the epochs, or over the compute where there are several.
        """
        from esper.telemetry.charts import growth_curves

        steps = range(self.record.num_steps)
        planted = [(t + 1, words) for t in steps for words in self._planted(t, self.best)]
        return growth_curves(self.curves(), self.score_name, planted)
