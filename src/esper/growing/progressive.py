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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, lr_scheduler
from torch.utils._pytree import tree_leaves

from esper.growing.slots import in_eval_mode
from esper.utils.errors import UserError, with_place
from esper.utils.flops import flop_counter

# With fewer blocks there is next to nothing to leave out.
FEWEST_BLOCKS = 4
# Of the steps. Where plain training takes as many steps, later growth costs less and can end behind it: a GPT
# at 21 tokens a parameter was level with growth after 13 %, GPT-2 at 22 behind by 0.0065 ± 0.0026 after 36 %.
# At equal compute later times are better. `esper.estimate` gives both.
GROW_AT = 0.13
PLAIN_CHECKPOINT = (
    "no progress of growth is saved with this run, and copies would overwrite what it has trained; leave the "
    "callback out"
)

# Of a block that returns a tensor: (). Of one that returns a tuple: which argument each entry is, or None.
Form = tuple[int | None, ...]


class Skip:
    """The forward of an inactive block: return the first argument in the form of a block's output."""

    form: Form = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = (*args, *kwargs.values())
        # What is passed from block to block goes on (T5's position bias). What else a block returns
        # (attention weights, a cache) does not exist here.
        return tuple(None if k is None else inputs[k] for k in self.form) if self.form else inputs[0]


def _record_form(name: str, skip: Skip, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Note the form of what a block returns, as a forward hook; raise a UserError where it has none."""
    form, made = _find_form(args, kwargs, output)
    if form is None or made:
        raise UserError(
            f"{name} cannot be skipped, since it does not return one tensor, of the shape of its input; give "
            "example= and such blocks are left alone"
        )
    skip.form = form


@dataclass(frozen=True)
class BlockList:
    """Blocks of one class and shape that stand one after another in a container of the model."""

    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    skip: Skip
    skipped: dict[nn.Module, Any] = field(default_factory=dict)  # and the forward that each had of its own

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def active(self) -> list[int]:
        """Indices of the blocks that run."""
        return [k for k, block in enumerate(self.blocks) if block not in self.skipped]

    def activate(self, wanted: Iterable[int]) -> None:
        """Let these blocks run and skip all others."""
        chosen = set(wanted)
        for k, block in enumerate(self.blocks):
            # An attribute of the instance goes ahead of the method of its class. Others use that too, such as
            # accelerate, which moves the weights of a block to its device there.
            own = vars(block).pop("forward", None)
            if block in self.skipped:
                own = self.skipped.pop(block)
            own = None if isinstance(own, Skip) else own  # of a copy that was made while blocks were skipped
            if k not in chosen:
                self.skipped[block] = own
                own = self.skip
            if own is not None:
                block.forward = own


def find_blocks(model: nn.Module) -> list[BlockList]:
    """Find runs of two or more like blocks in the lists and sequences of a model, outer ones first.

    Blocks are alike if their class, the names and shapes of their parameters and buffers, and the strides of
    their layers are the same. A module without children, such as a Linear layer, is not a block. Blocks with
    frozen parameters are left alone: a copy would overwrite what they keep. Raises a UserError for lazy
    layers that have not run yet.
    """
    found: list[BlockList] = []
    for path, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        children = [(f"{path}.{key}" if path else key, child) for key, child in container.named_children()]
        for _, group in groupby(children, key=lambda child: _signature(child[1])):
            names, blocks = zip(*group, strict=True)
            # A Linear or LayerNorm is skipped with the block that it is part of, never alone.
            parameters = [*blocks[0].parameters()]
            is_block = any(True for _ in blocks[0].children()) and bool(parameters)
            if is_block and len(blocks) > 1 and all(p.requires_grad for p in parameters):
                refuse_lazy(blocks[0], names[0])
                found.append(BlockList(names, blocks, Skip()))
    return found


def refuse_lazy(module: nn.Module, called: str) -> None:
    """Raise a UserError for lazy layers that have not run yet."""
    lazy = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise UserError(f"{lazy} of {called} has no shape yet; run the model on a batch first")


def drop_nested(lists: Sequence[BlockList]) -> list[BlockList]:
    """Leave out lists within a block of another: what is part of a block is skipped with it.

    Where there are too few blocks, those that are sequences are stages, and their entries the blocks.
    """
    kept: list[BlockList] = []
    for each in lists:
        inside = (each.names[0].startswith(f"{name}.") for other in kept for name in other.names)
        if not any(inside):
            kept.append(each)
    pairs = [pair for each in kept for pair in zip(each.names, each.blocks, strict=True)]
    stages = {name for name, block in pairs if type(block) is nn.Sequential}
    rows = [each for each in lists if each.names[0].rpartition(".")[0] in stages]
    return rows if rows and sum(map(len, kept)) < FEWEST_BLOCKS else kept


def _signature(block: nn.Module) -> tuple[Any, ...]:
    tensors = (*block.named_parameters(), *block.named_buffers())
    shapes = {
        name: (None if is_lazy(value) else tuple(value.shape), value.requires_grad) for name, value in tensors
    }
    strides = {  # of convolutions and pooling
        name: (layer.stride, getattr(layer, "dilation", None))
        for name, layer in block.named_modules()
        if isinstance(getattr(layer, "stride", None), int | tuple)
    }
    return type(block), shapes, strides


def choose_active(count: int, sizes: Sequence[int], order: str) -> list[list[int]]:
    """Choose which of `count` blocks are active at each size; every set holds the one before it.

    interleaved: spread evenly, so that a copy stands behind its source; stacked: the first ones.
    """
    chosen, wider = [], list(range(count))
    for size in reversed(sizes):
        wider = wider[:size] if order == "stacked" else [wider[k * len(wider) // size] for k in range(size)]
        chosen.append(wider)
    return chosen[::-1]


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
        order: Literal["interleaved", "stacked"] = "interleaved",
        example: Any = None,
        also: Sequence[nn.Module] = (),
        rewarm: int = 0,
        tied: float | None = None,
        scheduler: Any = None,
    ) -> None:
        """Skip blocks until it is time for them.

        optimizer: one, or several that share the parameters, such as Muon and AdamW
        start: share of the blocks that is active at first
        grow_at: the fractions of `total_steps` after which the model grows; the last growth makes it whole,
            and each multiplies the active blocks by the same factor
        order: interleaved copies stand behind their sources; stacked ones repeat the first blocks as a span
        example: what `model` is called with, a tuple of arguments, a dict of keyword arguments, or a function
            of the model that runs it; without it the first forward pass shows what blocks return
        also: models of the same structure that follow, such as an average of the weights
        rewarm: steps after each growth in which the learning rate rises linearly to its value; schedulers do
            not see the lower rate
        tied: (experimental) the fraction of `total_steps` until which new blocks share the parameters of
            their sources, after the last growth; 1.0: to the end
        scheduler: a learning-rate scheduler that steps with the optimizer, to check that it lasts

        Raises a UserError in one sentence for a model without blocks, blocks that share weights or change
        the shape of their input, an optimizer that lacks parameters of blocks, and a scheduler with too few
        steps.
        """
        fractions: tuple[Any, ...] = tuple(grow_at) if isinstance(grow_at, list | tuple) else (grow_at,)
        _check_options(total_steps, start, fractions, order, rewarm, tied, scheduler)
        self.total_steps, self.steps_done, self.stage, self.order = int(total_steps), 0, 0, order
        self.rewarm, self.grown_at, self.tied = rewarm, 0, tied
        self.model = model = _unwrap(model)
        if tied and any(base.__name__ == "FSDPModule" for m in model.modules() for base in type(m).__mro__):
            raise UserError("fully_shard puts parameters in place at every pass; leave out tied=")
        given = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
        # accelerate puts an optimizer of its own, which has no hooks, around the one that steps.
        self.optimizers = tuple(getattr(each, "optimizer", each) for each in given)
        if not given or not all(isinstance(getattr(each, "param_groups", None), list) for each in given):
            raise UserError(
                f"optimizer is {' '.join(repr(optimizer).split())}; give one of torch.optim that is made of "
                "model.parameters(), or several"
            )
        self._rate_hooks: list[Any] = []
        self._rates: dict[Optimizer, list[Any]] = {}  # of optimizers whose rate is lowered now
        self._shared: list[tuple[nn.Module, str, nn.Parameter]] = []  # parameters that tied blocks had
        self._tie_hooks: list[Any] = []
        # To untie blocks is one more stage, with the same blocks active.
        ends = fractions if tied is None else (*fractions, tied)
        self.grow_steps: tuple[int, ...] = tuple(round(fraction * total_steps) for fraction in ends)
        found = find_blocks(model)
        self.lists = drop_nested(found if example is None else _keep_skippable(model, found, example))
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
        shares = [start ** (1 - hop / hops) for hop in range(hops)] + [1.0] * (1 + len(ends) - hops)
        self._stages = [
            choose_active(len(each), [max(1, round(share * len(each))) for share in shares], order)
            for each in self.lists
        ]
        self._followers = [_same_blocks(other, self.lists) for other in also]
        self._hooks: list[Any] = []
        self.flops: list[int] = []  # of a forward pass over the example, stage by stage
        if example is None:
            for each in self.lists:
                record = partial(_record_form, each.names[0], each.skip)
                self._hooks.append(each.blocks[0].register_forward_hook(record, with_kwargs=True))
        else:
            self._run_stages(example)
        self.set_stage(0)
        self._trained = self._find_trained()  # a block that the first growth would overwrite, "" for none

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
        """Count an optimizer step, and grow or untie where it is time; return whether the model did.

        Raises a UserError where the optimizer had trained a skipped block before, and no state was loaded.
        """
        if self._trained and not self.whole:
            self.set_stage(len(self.grow_steps))  # for whoever goes on without growth
            raise UserError(
                f"{self._trained} was trained before, and is to be overwritten by a copy: train the model "
                "plainly, or give load_state_dict() the progress that was saved with it"
            )
        self.steps_done += 1
        due = sum(self.steps_done >= step for step in self.grow_steps)
        grown = due > self.stage
        while self.stage < due:
            self._grow()
        if self._rate_hooks and self.steps_done - self.grown_at >= self.rewarm:
            self._hook_rates()
        return grown

    @property
    def whole(self) -> bool:
        """Whether all blocks are active, with parameters of their own."""
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
        while self._shared:  # tied blocks take the parameters back that they had
            module, name, own = self._shared.pop()
            setattr(module, name, own)
        while self._tie_hooks:
            self._tie_hooks.pop().remove()
        for lists in (self.lists, *self._followers):
            for each, stages in zip(lists, self._stages, strict=True):
                each.activate(stages[stage])
        for earlier in range(1, stage + 1) if self.tied and not self.whole else ():
            for source, target in self._copies(earlier):
                self._share(source, target)

    def _grow(self) -> None:
        """Activate the blocks of the next stage as copies of those that were trained, or untie them."""
        stage = self.stage + 1
        while self._hooks:  # not before: a compiled model is compiled anew without them
            self._hooks.pop().remove()
        for source, target in self._copies(stage):
            copy_block(source, target, self.optimizers)
        if self.tied and stage == len(self.grow_steps):
            for module, name, own in self._shared:
                copy_parameter(getattr(module, name), own, self.optimizers)
        else:
            self.grown_at = self.steps_done
        self.set_stage(stage)
        self._hook_rates()

    def _copies(self, stage: int) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield the sources of the blocks that begin at a stage, each with the block."""
        for lists in (self.lists, *self._followers):
            for each, stages in zip(lists, self._stages, strict=True):
                old = stages[stage - 1]
                for k in (k for k in stages[stage] if k not in old):
                    # Stacked blocks repeat as a span (0 1 0 1); interleaved ones stand behind (0 0 1 1).
                    source = k % len(old) if self.order == "stacked" else max(i for i in old if i < k)
                    yield each.blocks[source], each.blocks[k]

    def _hook_rates(self) -> None:
        """Hook into the steps of the optimizers while the rate rises after a growth, and out of them then."""
        while self._rate_hooks:
            self._rate_hooks.pop().remove()
        if self.stage and self.steps_done - self.grown_at < self.rewarm:
            for each in self.optimizers:
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

    def _share(self, source: nn.Module, target: nn.Module) -> None:
        """Let a block use the parameters of another; those that it had are kept for the time after."""
        for new, old in zip(target.modules(), source.modules(), strict=True):
            for name, parameter in old.named_parameters(recurse=False):
                self._shared.append((new, name, getattr(new, name)))
                setattr(new, name, parameter)
        self._tie_hooks.append(target.register_state_dict_post_hook(_clone_entries))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the states of the model and the optimizer."""
        return {
            "steps_done": self.steps_done,
            "total_steps": self.total_steps,
            "stage": self.stage,
            "tied": self.tied,
            "grown_at": self.grown_at,
            "stages": [[list(stage) for stage in each] for each in self._stages],
            "forms": [list(each.skip.form) for each in self.lists],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; weights are not copied, they come with the model's own state."""
        try:
            counts = {name: int(state[name]) for name in ("steps_done", "total_steps", "stage", "grown_at")}
            forms = [tuple(None if k is None else int(k) for k in form) for form in state["forms"]]
            tied = state["tied"] is not None
        except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
            raise UserError(
                "the saved progress is not what state_dict() of a Progressive returns; give that"
            ) from error
        stages = self.state_dict()["stages"]
        same = state.get("stages", stages) == stages  # those saved before 0.2.5 have none
        same = same and len(forms) == len(self.lists) and tied == (self.tied is not None)
        if not same or not 0 <= counts["stage"] <= len(self.grow_steps):
            raise UserError(
                "the saved progress is of another model or schedule; give the same model, start, order, tied "
                "and number of times in grow_at"
            )
        if self._shared and counts["stage"] != self.stage:
            raise UserError("blocks of this model are tied now; load the saved states into a new one")
        if counts["total_steps"] != self.total_steps and counts["stage"] < len(self.grow_steps):
            warnings.warn(
                f"this run has {self.total_steps} steps, the saved one had {counts['total_steps']}; growth "
                f"is after steps {self.grow_steps} now",
                stacklevel=2,
            )
        self.steps_done, self.grown_at, self._trained = counts["steps_done"], counts["grown_at"], ""
        for each, form in zip(self.lists, forms, strict=True):
            each.skip.form = form
        self.set_stage(counts["stage"])
        self._hook_rates()

    def _find_trained(self) -> str:
        """Return the name of a skipped block that the optimizer's state shows to be trained, "" for none."""
        for each in self.lists:
            for k in set(range(len(each))) - set(each.active):
                states = [o.state.get(p, {}) for o in self.optimizers for p in each.blocks[k].parameters()]
                # Some optimizers make the state of a parameter before its first step, all zeros.
                values = [v for state in states if state.get("step", 1) for v in state.values()]
                if any(isinstance(v, Tensor) and v.ndim and bool(v.any()) for v in values):
                    return each.names[k]
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
                        raise UserError(
                            f"the optimizer does not have {name}.{key}; give it all parameters, also those "
                            "of skipped blocks"
                        )


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
    total_steps: Any,
    start: float,
    grow_at: tuple[Any, ...],
    order: str,
    rewarm: int,
    tied: float | None,
    scheduler: Any,
) -> None:
    """Raise a UserError for values that are not allowed."""
    numbers = {"total_steps": total_steps, "start": start, "rewarm": rewarm, "tied": tied or 0}
    for name, value in (*numbers.items(), *(("grow_at", each) for each in grow_at)):
        if not hasattr(value, "__float__"):
            raise UserError(f"{name} is {value!r}; give a number")
    if isinstance(total_steps, bool) or not 1 <= total_steps < math.inf or total_steps != int(total_steps):
        raise UserError(f"total_steps is {total_steps!r}; give the number of optimizer steps, at least 1")
    if not 0 < start <= 1:
        raise UserError(f"start is {start}; give the share of blocks that is active at first, above 0")
    if not grow_at or list(grow_at) != sorted({each for each in grow_at if 0 < each < 1}):
        raise UserError(f"grow_at is {grow_at}; give rising fractions of total_steps between 0 and 1")
    if order not in ("interleaved", "stacked"):
        raise UserError(f"order is {order!r}; allowed are 'interleaved' and 'stacked'")
    if tied is not None and not grow_at[-1] < tied <= 1:
        raise UserError(f"tied is {tied}; give a fraction above those of grow_at, at most 1")
    if (length := _schedule_length(scheduler)) < total_steps:
        raise UserError(
            f"{type(scheduler).__name__} ends after {length:.0f} of {total_steps} steps; make it for all of "
            "them"
        )
    if rewarm < 0:
        raise UserError(f"rewarm is {rewarm}; give a number of optimizer steps, or 0 for none")


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside of DistributedDataParallel and torch.compile."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__}; give an nn.Module")
    if isinstance(model, DistributedDataParallel):
        # A block that is skipped has no gradients; without this DDP waits for them in the next step.
        if not model.find_unused_parameters:
            raise UserError(
                "DistributedDataParallel needs find_unused_parameters=True, since blocks that are skipped "
                "have no gradients; wrap it anew"
            )
        model = model.module
    return getattr(model, "_orig_mod", model)  # of torch.compile


@torch.no_grad()
def copy_block(source: nn.Module, target: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
    """Copy weights, buffers and optimizer state of one block to another of the same shapes."""
    for new, old in zip(target.buffers(), source.buffers(), strict=True):
        new.copy_(old)
    for new, old in zip(target.parameters(), source.parameters(), strict=True):
        copy_parameter(old, new, optimizers)


@torch.no_grad()
def copy_parameter(source: Tensor, target: Tensor, optimizers: Sequence[Optimizer]) -> None:
    """Copy a parameter and its optimizer state to another of the same shape."""
    target.copy_(source)
    for optimizer in (each for each in optimizers if source in each.state):
        # With moments at 0 the first Adam steps of a copy would be as large as at the start of training.
        optimizer.state[target] = {
            key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in optimizer.state[source].items()
        }


def _schedule_length(scheduler: Any) -> float:
    """Return after how many steps a scheduler has no rate left to give; infinity where it does not say."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        return scheduler._milestones[-1] + _schedule_length(scheduler._schedulers[-1])
    if isinstance(scheduler, lr_scheduler.LambdaLR):  # the schedules of transformers
        options = getattr(scheduler.lr_lambdas[0], "keywords", {})
        return float(options.get("num_training_steps", math.inf))
    if isinstance(scheduler, lr_scheduler.LinearLR | lr_scheduler.PolynomialLR):
        # A rate that ends above 0, as after a warm-up, goes on.
        return math.inf if getattr(scheduler, "end_factor", 0) else scheduler.total_iters
    return float(getattr(scheduler, "total_steps", getattr(scheduler, "T_max", math.inf)))


def _clone_entries(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    """Give a tied block entries of its own in a state; of tensors that share memory safetensors keeps one."""
    own = (key for key, value in state.items() if key.startswith(prefix) and isinstance(value, Tensor))
    state.update({key: state[key].clone() for key in own})


def _find_form(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> tuple[Form | None, bool]:
    """Return the form of a block's output, and whether tensors stand in it that the block made besides.

    The form is None where the block cannot be skipped. Tensors made besides may be needed by the next block.
    """
    inputs, entries = (*args, *kwargs.values()), output if type(output) is tuple else (output,)
    first = (*inputs[:1], *entries[:1])
    tensors = len(first) == 2 and all(isinstance(value, Tensor) for value in first)
    if not tensors or first[0].shape != first[1].shape:
        return None, False
    given = {id(value): k for k, value in enumerate(inputs) if value is not None}
    made = any(isinstance(entry, Tensor) and id(entry) not in given for entry in entries[1:])
    return (0, *(given.get(id(entry)) for entry in entries[1:])) if type(output) is tuple else (), made


def count_flops(model: nn.Module, example: Any) -> int:
    """Count the FLOPs of a forward pass; `example` as in `Progressive`."""
    with flop_counter() as counter:
        _call(model, example)
    return int(counter.get_total_flops())


@torch.no_grad()
def _call(model: nn.Module, example: Any) -> Any:
    """Run a model once in eval mode: no running statistics change and no random numbers are drawn.

    Raises a UserError where it does not run.
    """
    try:
        with in_eval_mode(model):
            if callable(example):
                return example(model)
            if isinstance(example, Mapping):
                return model(**example)
            return model(*example) if isinstance(example, tuple | list) else model(example)
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} does not run on example= ({with_place(error)}); give what it is called "
            "with: a tensor, a tuple of arguments, a dict of keyword arguments, or a function of the model"
        ) from error


def _keep_skippable(model: nn.Module, lists: list[BlockList], example: Any) -> list[BlockList]:
    """Keep the lists whose blocks run once each, in order, and keep the shape of their input."""
    calls: list[tuple[nn.Module, tuple[Form | None, bool]]] = []
    list_of = {block: number for number, each in enumerate(lists) for block in each.blocks}
    passed = [object() for _ in lists]  # what the latest block of each list returned first

    def record(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs, latest = (*args, *kwargs.values()), passed[list_of[block]]
        form, made = _find_form(args, kwargs, output)
        if any(value is latest for value in inputs[1:]) and inputs[0] is not latest:
            form = None  # what goes from block to block is not the first argument, which a skip returns
        passed[list_of[block]] = output[0] if isinstance(output, tuple) and output else output
        calls.append((block, (form, made)))

    with ExitStack() as hooks:
        for block in (block for each in lists for block in each.blocks):
            hooks.enter_context(block.register_forward_hook(record, with_kwargs=True))
        output = _call(model, example)
    kept = []
    for each in lists:
        run = [(block, found) for block, found in calls if block in each.blocks]
        (form, made), *others = {found for _, found in run} or {(None, False)}
        if [block for block, _ in run] == list(each.blocks) and form is not None and not others:
            each.skip.form = form
            if not made or _ignores_rest(model, each, example, output):
                kept.append(each)
    return kept


def _ignores_rest(model: nn.Module, each: BlockList, example: Any, output: Any) -> bool:
    """Return whether a model has the same output without what blocks return besides the first tensor.

    True for attention weights that the caller did not ask for, False for the losses of a mixture of experts.
    """

    def leave_out(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entries: Any) -> Any:
        kept = each.skip(*args, **kwargs)
        return (entries[0], *kept[1:])

    with ExitStack() as hooks:
        for block in each.blocks:
            hooks.enter_context(block.register_forward_hook(leave_out, with_kwargs=True))
        try:
            without = _call(model, example)
        except Exception:  # the model needs what was left out; its own error would mislead
            return False
    values, others = tree_leaves(output), tree_leaves(without)
    return (
        len(values) == len(others)
        and any(isinstance(value, Tensor) for value in values)
        and all(
            torch.allclose(value, other, equal_nan=True) if isinstance(value, Tensor) else True
            for value, other in zip(values, others, strict=True)
        )
    )


def _same_blocks(model: nn.Module, lists: Sequence[BlockList]) -> list[BlockList]:
    """Return the blocks of another model under the same names, as in an average of the weights."""
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    prefix = "module." if "module." + lists[0].names[0] in modules else ""  # of AveragedModel
    missing = [name for each in lists for name in each.names if prefix + name not in modules]
    if missing:
        raise UserError(f"{type(model).__name__} in also= has no module {missing[0]}; give a list of copies")
    same = [tuple(modules[prefix + name] for name in each.names) for each in lists]
    return [BlockList(each.names, blocks, each.skip) for each, blocks in zip(lists, same, strict=True)]
