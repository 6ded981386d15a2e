"""Grow into a model: train it with a part of its blocks, then let the others begin as copies of trained ones.

    grower = Progressive(model, optimizer, total_steps=10_000)
    for inputs, targets in loader:
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        grower.step()

A block that is not active yet stays in the module tree, and its forward returns its input. So the class, the
parameter names, the optimizer's groups and `state_dict()` never change, and the result is the model that was
given.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Optimizer, lr_scheduler

from esper.growing.blocks import (
    FEWEST_BLOCKS,
    GREW,
    FirstPass,
    check_module,
    choose_active,
    copy_sources,
    count_flops,
    drop_nested,
    find_blocks,
    find_pretrained,
    keep_skippable,
    release,
    resolve_order,
    same_blocks,
)
from esper.utils.errors import UserError, with_place

# Of the steps. Where plain training takes as many steps, later growth costs less and can end behind it: with
# copies behind their sources a GPT at 21 tokens a parameter was level with growth after 13 %, GPT-2 at 22
# behind by 0.0065 ± 0.0026 after 36 %. At equal compute later times are better. `esper.estimate` gives both.
GROW_AT = 0.13
PLAIN_CHECKPOINT = (
    "no progress of growth is saved with this run, and copies would overwrite what it has trained; leave the "
    "callback out"
)

Order = Literal["middle", "interleaved", "stacked"]
ORDERS: tuple[str, ...] = get_args(Order)


class Progressive:
    """Train a model with a part of its blocks at first; call `step` after every optimizer step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        total_steps: int,
        *,
        start: float = 0.5,
        grow_at: float | Sequence[float] = GROW_AT,
        order: Order = "middle",
        example: Any = None,
        also: nn.Module | Sequence[nn.Module] = (),
        rewarm: int = 0,
        scheduler: Any = None,
        pretrained: bool | None = None,
    ) -> None:
        """Skip blocks until it is time for them.

        optimizer: one, or several that share the parameters, such as Muon and AdamW
        start: share of the blocks that is active at first
        grow_at: the fractions of `total_steps` after which the model grows; the last growth makes it whole,
            and each multiplies the active blocks by the same factor
        order: middle copies repeat all blocks but the first and the last as a span, stacked ones all blocks;
            interleaved ones stand behind their sources, and so do middle ones of fewer than four blocks
        example: what `model` is called with, a tuple of arguments, a dict of keyword arguments, or a function
            of the model that runs it; without it the first forward pass shows what blocks return
        also: one or several models of the same structure that follow, such as an average of the weights
        rewarm: steps after each growth in which the learning rate rises linearly to its value; schedulers do
            not see the lower rate
        scheduler: a learning-rate scheduler that steps with the optimizer, to check that it lasts
        pretrained: whether the model was trained before, so that copies would overwrite what it has learned;
            by default True of one that transformers loaded, or that was grown into in this process

        Raises a UserError in one sentence for a model without blocks, blocks that share weights or change
        the shape of their input, an optimizer that lacks parameters of blocks, and a scheduler with too few
        steps.
        """
        fractions: tuple[Any, ...] = tuple(grow_at) if np.ndim(grow_at) else (grow_at,)  # type: ignore[arg-type]
        _check_options(total_steps, start, fractions, order, rewarm, scheduler)
        self.total_steps, self.steps_done, self.stage = int(total_steps), 0, 0
        self.rewarm, self.grown_at = rewarm, 0
        self.model = model = _unwrap(model)
        self.optimizers = _find_optimizers(optimizer)
        self._rate_hooks: list[Any] = []
        self._rates: dict[Optimizer, list[Any]] = {}  # of optimizers whose rate is lowered now
        self.grow_steps: tuple[int, ...] = tuple(round(each * self.total_steps) for each in fractions)
        found = find_blocks(model)
        self.lists = drop_nested(found if example is None else keep_skippable(model, found, example))
        if self.blocks < FEWEST_BLOCKS:
            raise UserError(
                f"{type(model).__name__} has {self.blocks} blocks of one class and shape in a row of an "
                "nn.ModuleList or nn.Sequential that can be skipped, with weights of their own that are not "
                f"frozen, and growing needs {FEWEST_BLOCKS} or more; train it plainly"
            )
        self._check_parameters()
        # Each growth multiplies the active share by one factor: start · factor^hops = 1, so that the share
        # after k of them is start^(1 − k / hops).
        hops = len(fractions)
        shares = [start ** (1 - hop / hops) for hop in range(hops)] + [1.0]
        sizes = [[max(1, round(share * len(each))) for share in shares] for each in self.lists]
        self._orders = [resolve_order(order, own[0]) for own in sizes]
        choices = zip(self.lists, sizes, self._orders, strict=True)
        self._stages = [choose_active(len(each), own, its_order) for each, own, its_order in choices]
        if all(len(stages[0]) == len(stages[-1]) for stages in self._stages):
            raise UserError(f"start is {start}, which leaves out none of {self.blocks} blocks; give less")
        models = [also] if isinstance(also, nn.Module) else also or ()
        self._followers = [same_blocks(_unwrap(other), self.lists) for other in models]
        self._buffers = [each.common_buffers() for each in self.lists]
        self.flops: list[int] = []  # of a forward pass over the example, stage by stage
        self._first_pass = FirstPass(())  # while the stages are tried
        if example is not None:
            self._run_stages(example)
        self.set_stage(0)
        self._first_pass = FirstPass(self.lists, tried=example is not None)
        self._first_growth = True  # is still to come, and may overwrite nothing that was trained
        self._overwrites = self._find_trained() or self._find_pretrained(pretrained)  # why it may not come

    def _run_stages(self, example: Any) -> None:
        """Run every stage once: count its FLOPs, or raise a UserError where the model does not run."""
        for stage in range(len(self.grow_steps) + 1):
            self.set_stage(stage)
            try:
                self.flops.append(count_flops(self.model, example))
            except UserError as error:
                self.set_stage(len(self.grow_steps))
                raise UserError(
                    f"{type(self.model).__name__} does not run while blocks of it are skipped "
                    f"({with_place(error.__cause__ or error)}); train it plainly"
                ) from error

    def __repr__(self) -> str:
        steps = f"{self.steps_done} of {self.total_steps} steps done"
        return f"<Progressive: {self.active} of {self.blocks} blocks active, {steps}>"

    @property
    def active(self) -> int:
        """How many blocks run now."""
        return sum(len(each.active) for each in self.lists)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return sum(map(len, self.lists))

    @property
    def saved(self) -> float:
        """The share of the FLOPs of plain training that growth leaves out; a UserError without an example."""
        self._check_counted()
        lengths = [end - begin for begin, end in pairwise([0, *self.grow_steps, self.total_steps])]
        spent = sum(steps * flops for steps, flops in zip(lengths, self.flops, strict=True))
        return 1.0 - spent / (self.total_steps * self.flops[-1])

    def _check_counted(self) -> None:
        if not self.flops:
            raise UserError("what growth saves is not known; give example= to count the FLOPs of the model")

    def step(self) -> bool:
        """Count an optimizer step, and grow where it is time; return whether the model did.

        Raises a UserError where a growth would overwrite what was trained, and no state was loaded.
        """
        self._first_pass.forget()
        self.steps_done += 1
        if self.steps_done == self.total_steps + 1:
            warnings.warn(f"more than total_steps={self.total_steps} steps; growth came early", stacklevel=2)
        due = sum(self.steps_done >= step for step in self.grow_steps)
        grown = due > self.stage
        if self._first_growth and not self.whole and (grown or self.steps_done == 1):
            self._overwrites = self._overwrites or self._find_trained(gradients=True)
        if self._overwrites and not self.whole:
            self.set_stage(len(self.grow_steps))  # for whoever goes on without growth
            raise UserError(
                f"{self._overwrites}: copies would overwrite what was learned; train the model plainly, or "
                "give load_state_dict() the progress that was saved with it"
            )
        while self.stage < due:
            self._grow()
        if self._rate_hooks and self.steps_done - self.grown_at >= self.rewarm:
            self._hook_rates()
        return grown

    def active_flags(self) -> Tensor:
        """Tell which blocks run now, those of all lists.  # [blocks] bool"""
        flags = [k in each.active for each in self.lists for k in range(len(each))]
        return torch.tensor(flags, dtype=torch.bool)

    @property
    def whole(self) -> bool:
        """Whether all blocks are active."""
        return self.stage == len(self.grow_steps)

    @property
    def share(self) -> float:
        """The FLOPs of a forward pass now, relative to the whole model; a UserError without an example."""
        self._check_counted()
        return self.flops[self.stage] / self.flops[-1]

    def complete(self) -> None:
        """Activate all blocks now, as where training ends before its time."""
        while not self.whole:
            self._grow()

    def set_stage(self, stage: int) -> None:
        """Go back, or forth, to the active blocks of a stage; weights are not copied."""
        self.stage = stage
        if self.whole:
            self._first_pass.remove()
        for lists in (self.lists, *self._followers):
            for each, stages in zip(lists, self._stages, strict=True):
                each.activate(stages[stage])

    def _grow(self) -> None:
        """Activate the blocks of the next stage as copies of those that were trained."""
        if unseen := self._first_pass.find_unseen():
            self.set_stage(len(self.grow_steps))
            raise UserError(unseen)
        self._first_pass.remove()  # not before: a compiled model is compiled anew without its hooks
        trained = [p for each in self.lists for k in each.active for p in each.blocks[k].parameters()]
        held = any(p in each.state or isinstance(each, SGD) for each in self.optimizers for p in trained)
        if self._first_growth and self.steps_done and not held:
            warnings.warn("no optimizer has state for trained blocks; give the one that steps", stacklevel=3)
        for lists in (self.lists, *self._followers):
            own = zip(lists, self._stages, self._orders, self._buffers, strict=True)
            for each, stages, order, buffers in own:
                for source, k in copy_sources(stages[self.stage], stages[self.stage + 1], order):
                    copy_block(each.blocks[source], each.blocks[k], self.optimizers, buffers)
        self.grown_at, self._first_growth = self.steps_done, False
        self.set_stage(self.stage + 1)
        if self.whole and self.steps_done:
            GREW.update(block for each in self.lists for block in each.blocks)
        self._hook_rates()

    def _hook_rates(self) -> None:
        """Hook into the steps of the optimizers while the rate rises after a growth, and out of them then."""
        while self._rate_hooks:
            self._rate_hooks.pop().remove()
        if self.stage and self.steps_done - self.grown_at < self.rewarm:
            for each in (own for own in self.optimizers if not _inside(own)):
                self._rate_hooks.append(each.register_step_pre_hook(self._lower_rates))
                self._rate_hooks.append(each.register_step_post_hook(self._restore_rates))

    def _lower_rates(self, optimizer: Optimizer, *_: Any) -> None:
        # Schedulers compute the next rate from the present one, so that it is lower within the step alone.
        share = (self.steps_done - self.grown_at + 1) / (self.rewarm + 1)
        # The hooks of an optimizer whose `step` calls that of its base class run twice.
        rates = self._rates.setdefault(optimizer, [group["lr"] for group in optimizer.param_groups])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share

    def _restore_rates(self, optimizer: Optimizer, *_: Any) -> None:
        # The second of two such calls finds no rates and changes nothing.
        for group, rate in zip(optimizer.param_groups, self._rates.pop(optimizer, ()), strict=False):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the states of the model and the optimizer."""
        return {
            "steps_done": self.steps_done,
            "total_steps": self.total_steps,
            "stage": self.stage,
            "grown_at": self.grown_at,
            "stages": [[list(stage) for stage in each] for each in self._stages],
            "forms": [list(each.form) for each in self.lists],
            "buffers": [list(each) for each in self._buffers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; weights are not copied, they come with the model's own state."""
        try:
            counts = {name: int(state[name]) for name in ("steps_done", "total_steps", "stage", "grown_at")}
            forms = [tuple(None if k is None else int(k) for k in form) for form in state["forms"]]
            buffers = [[str(name) for name in each] for each in state.get("buffers", self._buffers)]
            lengths = [len(each[-1]) for each in state.get("stages", self._stages)]
        except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
            raise UserError("the progress is not what state_dict() of a Progressive returns") from error
        own = self.state_dict()["stages"]
        same = len(forms) == len(buffers) == len(self.lists) and not state.get("tied")
        same &= lengths == [*map(len, self.lists)] and 0 <= counts["stage"] <= len(self.grow_steps)
        last = min(map(len, state.get("stages", ())), default=0) - 1  # where that model was whole
        same &= counts["stage"] < len(self.grow_steps) or counts["stage"] >= last
        if counts["stage"] < len(self.grow_steps):  # how it began does not matter to a model that is whole
            # Those saved before 0.2.5 have no stages, and copies that stand behind their sources.
            same &= state["stages"] == own if "stages" in state else "middle" not in self._orders
        if not same:
            raise UserError(
                "the saved progress is of another model or schedule; give the same model, start, order and "
                "number of times in grow_at (order='interleaved' if it was saved before version 0.5)"
            )
        if counts["total_steps"] != self.total_steps and counts["stage"] < len(self.grow_steps):
            warnings.warn(
                f"this run has {self.total_steps} steps, the saved one had {counts['total_steps']}; growth "
                f"is after steps {self.grow_steps} now",
                stacklevel=2,
            )
        self.steps_done, self.grown_at, self._buffers = counts["steps_done"], counts["grown_at"], buffers
        self._first_growth, self._overwrites = False, ""
        for each, form in zip(self.lists, forms, strict=True):
            each.form = form
        self.set_stage(counts["stage"])
        self._hook_rates()

    def _find_trained(self, gradients: bool = False) -> str:
        """Name a skipped block that has optimizer state or, if asked, gradients; "" where there is none."""
        for each in self.lists:
            for k in set(range(len(each))) - set(each.active):
                own = [*each.blocks[k].parameters()]
                states = [optimizer.state.get(p, {}) for optimizer in self.optimizers for p in own]
                # Some optimizers make the state of a parameter before its first step, all zeros.
                values = [v for state in states if state.get("step", 1) for v in state.values()]
                values += [p.grad for p in own] if gradients else []
                if any(isinstance(v, Tensor) and v.ndim and bool(v.any()) for v in values):
                    return f"{each.names[k]} was trained although it is to be skipped"
        return ""

    def _find_pretrained(self, pretrained: bool | None) -> str:
        """Say that the model was trained before, where that is known; else return ""."""
        name = find_pretrained(self.model, self.lists)
        if name if pretrained is None else pretrained:
            name = name or type(self.model).__name__
            return f"{name} was trained before (pretrained=False says it was not)"
        return ""

    def _check_parameters(self) -> None:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        trained = {id(p) for group in groups for p in group["params"]}
        seen: dict[int, str] = {}
        for each in self.lists:
            for name, block in zip(each.names, each.blocks, strict=True):
                for key, parameter in block.named_parameters():
                    if seen.setdefault(id(parameter), name) != name:
                        raise UserError(
                            f"blocks {seen[id(parameter)]} and {name} share {key}, and copies need weights "
                            "of their own; train it plainly"
                        )
                    if parameter.requires_grad and id(parameter) not in trained:
                        raise UserError(f"the optimizer does not have {name}.{key}; give it all parameters")


def end_training(grower: Progressive | None) -> None:
    """Activate all blocks at the end of training, and warn where that is before its time."""
    assert grower is not None
    if grower.active < grower.blocks:
        warnings.warn(
            f"training ended after {grower.steps_done} of {grower.total_steps} steps, before the model was "
            "whole: the blocks that were skipped are copies now",
            stacklevel=2,
        )
    grower.complete()


def _check_options(
    total_steps: Any, start: float, grow_at: tuple[Any, ...], order: str, rewarm: int, scheduler: Any
) -> None:
    """Raise a UserError for values that are not allowed."""
    numbers = {"total_steps": total_steps, "start": start, "rewarm": rewarm}
    for name, value in (*numbers.items(), *(("grow_at", each) for each in grow_at)):
        if not hasattr(value, "__float__"):
            raise UserError(f"{name} is {value!r}; give a number")
    if isinstance(total_steps, bool) or not 1 <= total_steps < math.inf or total_steps != int(total_steps):
        raise UserError(f"total_steps is {total_steps!r}; give the number of optimizer steps, at least 1")
    if not 0 < start <= 1:
        raise UserError(f"start is {start}; give the share of blocks that is active at first, from 0 to 1")
    if not grow_at or list(grow_at) != sorted({each for each in grow_at if 0 < each < 1}):
        raise UserError(f"grow_at is {grow_at}; give rising fractions of total_steps between 0 and 1")
    if order not in ORDERS:
        raise UserError(f"order is {order!r}; allowed are {', '.join(map(repr, ORDERS))}")
    if (length := _schedule_length(getattr(scheduler, "scheduler", scheduler))) < total_steps:  # accelerate's
        raise UserError(f"the scheduler ends after {length:.0f} of {total_steps} steps; make it last for all")
    if rewarm < 0:
        raise UserError(f"rewarm is {rewarm}; give a number of optimizer steps, or 0 for none")


def _find_optimizers(given: Any) -> tuple[Optimizer, ...]:
    """Return the optimizers that were given and those inside of them; raise a UserError for unfit ones."""
    found = [*given] if isinstance(given, Sequence) else [given]
    if not found or not all(isinstance(getattr(each, "param_groups", None), list) for each in found):
        raise UserError(
            f"optimizer is {' '.join(repr(given).split())}; give one of torch.optim that is made of "
            "model.parameters(), or several"
        )
    for each in found:  # which gets longer on the way
        found += [inner for inner in _inside(each) if inner not in found]
    if any(isinstance(each, LBFGS) for each in found):
        raise UserError("a growth makes the history that LBFGS keeps wrong; use another optimizer")
    zero = any(type(each).__name__ == "ZeroRedundancyOptimizer" for each in found)
    if zero and distributed.get_world_size() > 1:
        raise UserError("copies cannot have the state that ZeroRedundancyOptimizer spreads; use fully_shard")
    return tuple(each for each in found if hasattr(each, "state"))


def _inside(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers that one holds, such as SAM its base, or accelerate's the one that steps."""
    return [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside of DistributedDataParallel and torch.compile."""
    check_module(model, whole=False)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UserError("FullyShardedDataParallel (FSDP1) cannot skip blocks; use fully_shard (FSDP2)")
    if isinstance(model, DistributedDataParallel):
        # A block that is skipped has no gradients; without this DDP waits for them in the next step.
        if not model.find_unused_parameters:
            raise UserError("DDP needs find_unused_parameters=True, since skipped blocks have no gradients")
        if model.static_graph:
            raise UserError("a growth changes the graph; wrap the model anew without static_graph=True")
        model = model.module
    release(model)
    return getattr(model, "_orig_mod", model)  # of torch.compile


@torch.no_grad()
def copy_block(
    source: nn.Module, target: nn.Module, optimizers: Sequence[Optimizer], buffers: Sequence[str]
) -> None:
    """Copy weights, optimizer state and the named buffers of one block to another of the same shapes."""
    for name in buffers:
        new, old = target.get_buffer(name), source.get_buffer(name)
        if new.shape != old.shape:  # it grew in a forward pass
            path, _, own = name.rpartition(".")
            setattr(target.get_submodule(path), own, old.clone())
        elif not new.equal(old):  # nothing can be written to one that is expanded
            new.copy_(old)
    for new, old in zip(target.parameters(), source.parameters(), strict=True):
        copy_parameter(old, new, optimizers)


@torch.no_grad()
def copy_parameter(source: Tensor, target: Tensor, optimizers: Sequence[Optimizer]) -> None:
    """Copy a parameter and its optimizer state to another of the same shape."""
    target.copy_(source)
    for optimizer in (each for each in optimizers if source in each.state):
        # With moments at 0 the first Adam steps of a copy would be as large as at the start of training.
        state = {
            key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in optimizer.state[source].items()
        }
        # The target may be another optimizer's of the same kind, as where each layer has its own.
        for o in (optimizer, *optimizers):
            if type(o) is type(optimizer) and any(target is p for g in o.param_groups for p in g["params"]):
                o.state[target] = state
                break


def _schedule_length(scheduler: Any) -> float:
    """Return after how many steps a scheduler has no rate left to give; infinity where it does not say."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        return sum(scheduler._milestones[-1:]) + _schedule_length(scheduler._schedulers[-1])
    if isinstance(scheduler, lr_scheduler.LambdaLR):  # the schedules of transformers
        options = getattr(scheduler.lr_lambdas[0], "keywords", {})
        parts = [options.get(f"num_{part}_steps", math.inf) for part in ("warmup", "stable", "decay")]
        return float(options.get("num_training_steps", sum(parts)))
    if isinstance(scheduler, lr_scheduler.LinearLR | lr_scheduler.PolynomialLR):
        # A rate that ends above 0, as after a warm-up, goes on.
        return math.inf if getattr(scheduler, "end_factor", 0) else scheduler.total_iters
    return float(getattr(scheduler, "total_steps", getattr(scheduler, "T_max", math.inf)))
