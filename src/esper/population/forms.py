"""The architectures that can stand at a slot, by number: a part's *form*.

The forms of a slot are its blueprints, by their own numbers, and behind them the residual block ahead of the
slot at every number of units (its class: how often it was widened by half), the block before that one where a
clone repeats two, and both as one. A seed that germinated as CLONE has the form of what it repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from esper.lifecycle.actions import GROWTH_BLUEPRINTS, NUM_BLUEPRINTS, Blueprint
from esper.population.blocks import Branch, fold_units
from esper.population.blueprints import BlendGate, build_blueprint
from esper.population.hosts import Host, block_of
from esper.population.row_module import RowModule

NO_FORM = -1  # an empty position
HALVES = {Blueprint.WIDEN_HALF: 1, Blueprint.WIDEN_FULL: 2}  # by how many classes a widening raises its block


@dataclass(frozen=True)
class FormCodes:
    """The numbers of the forms behind the blueprints; `classes` is how many sizes a block can have."""

    classes: int

    @property
    def block(self) -> int:
        """The block ahead of the slot, class 0; class j lies j further on."""
        return NUM_BLUEPRINTS

    @property
    def lead(self) -> int:
        """The block before that one, where a clone repeats two."""
        return self.block + self.classes

    @property
    def pair(self) -> int:
        """Both: class a of the leading block and class b of the other lie a · classes + b further on."""
        return self.lead + self.classes

    @property
    def total(self) -> int:
        return self.pair + self.classes**2

    def blocks_of_pair(self, form: int) -> tuple[int, int]:
        """Return the forms of the two blocks of a pair."""
        lead, block = divmod(form - self.pair, self.classes)
        return self.lead + lead, self.block + block


class Body:
    """One form as a function of rows of weights and activations; its output is added to the activations.

    `modules` run one after the other, each on its own columns of the rows; a pair of blocks has two.
    """

    def __init__(self, modules: tuple[RowModule, ...], starts: tuple[int, ...] = (0,)) -> None:
        self.modules, self.starts = modules, starts
        self.parameters = sum(module.layout.total for module in modules)
        self.width = starts[-1] + modules[-1].layout.total  # of a row: the modules of a pair lie apart
        self.in_row_form = all(module.in_row_form for module in modules)

    def __call__(self, rows: Tensor, x: Tensor) -> Tensor:
        """rows [E, P], x [E, B, ...] → [E, B, ...]"""
        delta = self.modules[0](rows, x)
        for start, module in zip(self.starts[1:], self.modules[1:], strict=True):
            delta = delta + module(rows[:, start:], x + delta)
        return delta

    def spans(self) -> list[tuple[int, int]]:
        """Return where each parameter tensor lies in a row: start and stop."""
        found = []
        for start, module in zip(self.starts, self.modules, strict=True):
            for size in module.layout.sizes:
                found.append((start, start + size))
                start += size
        return found


class SlotForms:
    """The forms of one slot. Modules are built when they are first asked for."""

    def __init__(self, host: Host, slot: int, make_rows: Callable[[nn.Module], RowModule], codes: FormCodes):
        self.host, self.slot, self.codes, self._make_rows = host, slot, codes, make_rows
        self._bodies: dict[int, Body] = {}
        self.gate = make_rows(BlendGate(host.widths[slot], host.spatial_dims))
        self.branch = _branch_of(host, slot)
        pairs = host.repeats[slot] == 2 and self.branch is not None
        self.lead = _branch_of(host, slot - 1) if pairs else None

    @property
    def repeats(self) -> int:
        """How many blocks a clone repeats."""
        return 1 if self.lead is None else 2

    @cached_property
    def blueprints(self) -> tuple[Blueprint, ...]:
        """The blueprints that can be germinated here; a host may keep clones to some of its slots."""
        absent = set() if self.branch is not None else set(GROWTH_BLUEPRINTS)
        absent |= {Blueprint.CLONE} if self.host.repeats[self.slot] == 0 else set()
        return tuple(sorted(self.host.blueprints - absent))

    @cached_property
    def forms(self) -> tuple[int, ...]:
        """The forms that can stand here."""
        plain = [int(b) for b in self.blueprints if b is not Blueprint.CLONE]
        if self.branch is None:
            return tuple(plain)
        codes = self.codes
        last = codes.lead if self.lead is None else codes.total
        return (*plain, *range(codes.block, last))

    def body(self, form: int) -> Body:
        """Return the body of a form; raises ValueError for one that cannot stand here."""
        if form not in self._bodies:
            if form not in self.forms:
                given = Blueprint(form).name if form in tuple(Blueprint) else "no blueprint"
                allowed = ", ".join(blueprint.name for blueprint in self.blueprints)
                raise ValueError(f"a seed is {given}; slots of this {self.host.topology} host take {allowed}")
            if form >= self.codes.pair:
                lead, block = (self.body(part).modules for part in self.codes.blocks_of_pair(form))
                self._bodies[form] = Body((*lead, *block), (0, self.pair_start))
            else:
                self._bodies[form] = Body((self._make_rows(self.module(form)),))
        return self._bodies[form]

    def module(self, form: int) -> nn.Module:
        """Build a new module of a form that is no pair."""
        if form >= self.codes.lead:
            assert self.lead is not None
            return self.lead.with_units(self.units(self.lead, form - self.codes.lead))
        if form >= self.codes.block:
            assert self.branch is not None
            return self.branch.with_units(self.units(self.branch, form - self.codes.block))
        if form in HALVES:
            assert self.branch is not None
            return self.branch.with_units(HALVES[Blueprint(form)] * _half(self.branch))
        width = self.host.widths[self.slot]
        return build_blueprint(form, self.host.topology, width, self.host.spatial_dims)

    def units(self, branch: Branch, widened: int) -> int:
        """Return how many units a branch has that was widened so many times by half."""
        return branch.units + widened * _half(branch)

    @cached_property
    def pair_start(self) -> int:
        """Where the second block of a pair begins in its row."""
        return self.body(self.codes.lead + self.codes.classes - 1).parameters

    @cached_property
    def gate_start(self) -> int:
        """A seed's row holds a blueprint's parameters from 0 and its gate's from here."""
        return max(self.body(f).parameters for f in self.forms if f < NUM_BLUEPRINTS)

    @cached_property
    def width(self) -> int:
        """The longest row of any form here."""
        return max(self.gate_start + self.gate.layout.total, *(self.body(form).width for form in self.forms))

    def fold_index(self, form: int, blueprint: Blueprint) -> Tensor:
        """Return where each element of a widened block comes from.

        An index into the block's row followed by the seed's.  # [P of the wider block] int64

        form: a block of any class but the widest
        """
        assert self.branch is not None
        # Folding column numbers instead of weights gives the index of a gather.
        host, seed = self._columns(form), self._columns(int(blueprint), start=self.width)
        folded = fold_units(host, seed, self.branch.copies)
        wider = self.body(form + HALVES[blueprint]).modules[0].layout
        return torch.cat([folded[name].flatten() for name in wider.names])

    def _columns(self, form: int, start: int = 0) -> dict[str, Tensor]:
        """Return the columns of each parameter of a form of one module, counted from `start`."""
        columns = torch.arange(start, start + self.width).unsqueeze(0)
        return {name: x[0] for name, x in self.body(form).modules[0].layout.unflatten(columns).items()}


def last_forms(forms: Tensor, back: int = 0) -> Tensor:
    """Return the form of the last part folded in at each slot, or of the one `back` before it, or NO_FORM.

    forms [N, S, positions] with the seeds at position 0 → [N, S]
    """
    position = (forms[:, :, 1:] != NO_FORM).sum(2) - back
    last = forms.gather(2, position.clamp(min=0).unsqueeze(2)).squeeze(2)
    return last.masked_fill(position < 1, NO_FORM)


def lead_classes(forms: Tensor, codes: FormCodes) -> Tensor:
    """Return the class of the block before the last one, in its slot or at the end of the one ahead.

    NO_FORM where there is none.  # forms [N, S, positions] → [N, S]
    """
    inside, ahead = last_forms(forms, back=1), last_forms(forms).roll(1, dims=1)
    # A block that was folded in as the first of a pair has a lead's form, the host's own has a block's.
    number = torch.where(inside != NO_FORM, inside - codes.lead, ahead - codes.block)
    return number.masked_fill((number < 0) | (number >= codes.classes), NO_FORM)


def cloned_forms(forms: Tensor, repeats_two: Tensor, codes: FormCodes) -> Tensor:
    """Return the form of a clone of what stands ahead of each slot.  # [N, S, positions], [S] → [N, S]"""
    last = last_forms(forms)
    pair = codes.pair + lead_classes(forms, codes) * codes.classes + last - codes.block
    return torch.where(repeats_two, pair, last)


def _branch_of(host: Host, slot: int) -> Branch | None:
    block = block_of(host.segments[slot])
    return None if block is None else block.branch


def _half(branch: Branch) -> int:
    """Return half of a branch's units, at least one: the step of a widening."""
    return max(1, branch.units // 2)
