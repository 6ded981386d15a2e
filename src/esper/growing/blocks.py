"""Find the blocks of a model that can be skipped, and skip them.

A block can be skipped where its input is what the block before it returned, and has the shape of what it
returns itself. What is skipped stays in the module tree: only its forward is another one for a while.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from threading import get_ident
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_leaves

from esper.growing.slots import in_eval_mode
from esper.utils.errors import UserError, with_place
from esper.utils.flops import flop_counter

# With fewer blocks there is next to nothing to leave out.
FEWEST_BLOCKS = 4
FEWEST_FOR_MIDDLE = 4  # blocks that train first: repeating the middle was measured with 4 and 6 of them
CONTAINERS = (nn.ModuleList, nn.Sequential)
# Of a block that returns a tensor: (). Of one that returns a tuple: which argument each entry is, or None.
Form = tuple[int | None, ...]
GREW: WeakSet[nn.Module] = WeakSet()  # blocks of models that were grown into in this process


class Skip:
    """The forward of a skipped block: return the first argument in the form of the block's output.

    A copy of the model, such as an average of its weights, holds copies of these: they run the copied block
    as soon as the original is no longer skipped.
    """

    def __init__(self, each: BlockList, block: nn.Module) -> None:
        self.each, self.block, self.origin, self.waiting = each, block, self, False

    def __deepcopy__(self, memo: dict[int, Any]) -> Skip:
        copied = Skip(self.each, copy.deepcopy(self.block, memo))
        copied.origin = self.origin
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.origin.waiting:
            return type(self.block).forward(self.block, *args, **kwargs)
        return self.each.pass_on(args, kwargs)


@dataclass(eq=False)
class BlockList:
    """Like blocks that stand one after another in a container of the model."""

    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    form: Form = ()
    leader: BlockList | None = None  # of the model that this one follows, as an average does
    skips: dict[nn.Module, Skip] = field(default_factory=dict)
    own_forwards: dict[nn.Module, Any] = field(default_factory=dict)  # that skipped blocks had
    compiled: bool = False  # so that nobody sees what its blocks go on with

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def active(self) -> list[int]:
        """Indices of the blocks that run."""
        return [k for k, block in enumerate(self.blocks) if block not in self.own_forwards]

    def activate(self, wanted: Iterable[int]) -> None:
        """Let these blocks run and skip all others."""
        chosen = set(wanted)
        for k, block in enumerate(self.blocks):
            # An attribute of the instance goes ahead of the method of its class. Others use that too, such as
            # accelerate, which moves the weights of a block to its device there.
            own = vars(block).pop("forward", None)
            before = self.own_forwards.pop(block, None)
            own = before if isinstance(own, Skip) else own  # of a copy made while blocks were skipped
            skip = self.skips.setdefault(block, Skip(self, block))
            skip.waiting = k not in chosen
            if skip.waiting:
                self.own_forwards[block], own = own, skip
            if own is not None:
                block.forward = own

    def pass_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a skipped block returns for these arguments."""
        inputs, form = (*args, *kwargs.values()), (self.leader or self).form
        # What is passed from block to block goes on (T5's position bias). What else a block returns
        # (attention weights, a cache) does not exist here.
        return tuple(None if k is None else inputs[k] for k in form) if form else inputs[0]

    def common_buffers(self) -> list[str]:
        """List the saved buffers that go with the weights, and those that are equal in all blocks.

        Others say what a block is: its mask, its scale, its place.
        """
        first, *others = [dict(block.named_buffers()) for block in self.blocks]
        # Hooks of state_dict() may rename what it holds.
        unsaved = {id(m._buffers[n]) for m in self.blocks[0].modules() for n in m._non_persistent_buffers_set}
        own = (n for n in first if id(first[n]) not in unsaved and all(n in other for other in others))
        return [n for n in own if _of_weights(self.blocks[0], n) or all(first[n].equal(o[n]) for o in others)]


def _of_weights(block: nn.Module, name: str) -> bool:
    """Tell whether a buffer holds running statistics of a norm, or what a weight is computed from."""
    path, _, own = name.rpartition(".")
    module = block.get_submodule(path)
    spectral = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    statistics = isinstance(module, _NormBase) or own.startswith("running_")
    return spectral or statistics or "parametrizations" in path.split(".")


def release(model: nn.Module) -> None:
    """Let go of the blocks that earlier growers of a model hold: they all run, and nothing watches them."""
    for module in model.modules():
        own = vars(module).get("forward")
        if isinstance(own, Skip) and own.origin is own:
            own.each.activate(range(len(own.each)))
        for hook in [*module._forward_hooks.values()]:
            watcher = getattr(getattr(hook, "func", None), "__self__", None)
            if isinstance(watcher, FirstPass):
                watcher.remove()


# ---- finding -------------------------------------------------------------------------------------------


def check_module(model: Any, otherwise: str = "", whole: bool = True) -> None:
    """Raise a UserError for what is no nn.Module and, with `whole`, where a grower skips blocks of it now."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UserError(f"the model is a{'n' * (kind[0] in 'aeiou')} {kind}; give an nn.Module{otherwise}")
    for name, module in model.named_modules() if whole else ():
        forward = vars(module).get("forward")
        if isinstance(forward, Skip) and forward.origin.waiting:
            raise UserError(f"{name} of {type(model).__name__} is skipped now; call grower.complete() first")


def find_pretrained(model: nn.Module, lists: Sequence[BlockList]) -> str:
    """Name the class around blocks that transformers loaded, or that was grown into; "" without one."""
    names = [f"{name}." for each in lists for name in each.names]
    for path, module in model.named_modules():
        # transformers marks such models, but also those that AutoConfig alone was loaded for.
        if getattr(module, "name_or_path", None) and any(n.startswith(path and f"{path}.") for n in names):
            return type(module).__name__
    grew = any(block in GREW for each in lists for block in each.blocks)
    return type(model).__name__ if grew else ""


def find_blocks(model: nn.Module) -> list[BlockList]:
    """Find runs of like blocks in the lists and sequences of a model, two or more, outer ones first.

    Blocks are alike if their class, the names and shapes of their parameters and buffers, the strides of
    their layers and their plain settings are the same. Blocks that alternate, such as those with sliding and
    with full attention, are lists of their own. A module without children, such as a Linear layer, is not a
    block. Blocks with frozen parameters are left alone: a copy would overwrite what they keep. Raises a
    UserError for lazy layers that have not run yet.
    """
    found: list[BlockList] = []
    for path, container in model.named_modules():
        if not isinstance(container, CONTAINERS):
            continue
        children = [(f"{path}.{key}" if path else key, child) for key, child in container.named_children()]
        for _, run in groupby(children, key=lambda child: _signature(child[1])):
            for names, blocks in _split_kinds(list(run)):
                # A Linear or LayerNorm is skipped with the block that it is part of, never alone; a list
                # within a list never runs as such.
                parameters = [*blocks[0].parameters()]
                is_block = any(True for _ in blocks[0].children()) and bool(parameters)
                is_block &= not isinstance(blocks[0], nn.ModuleList | nn.ModuleDict)
                if is_block and len(blocks) > 1 and all(p.requires_grad for p in parameters):
                    refuse_lazy(blocks[0], names[0])
                    found.append(BlockList(names, blocks))
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
    shapes = {name: (None if is_lazy(x) else tuple(x.shape), x.requires_grad) for name, x in tensors}
    strides = {  # of convolutions and pooling
        name: (layer.stride, getattr(layer, "dilation", None))
        for name, layer in block.named_modules()
        if isinstance(getattr(layer, "stride", None), int | tuple)
    }
    return type(block), shapes, strides


def _split_kinds(run: list[tuple[str, nn.Module]]) -> list[tuple[tuple[str, ...], tuple[nn.Module, ...]]]:
    """Split a run of blocks by the settings in which they differ: the names and blocks of each kind."""
    settings = [_plain_settings(block) for _, block in run]
    shared = [key for key in settings[0] if all(key in other for other in settings)]
    telling = [key for key in shared if _tells_kind([own[key] for own in settings])]
    kinds: dict[str, list[tuple[str, nn.Module]]] = {}
    for entry, own in zip(run, settings, strict=True):
        kinds.setdefault(repr([own[key] for key in telling]), []).append(entry)
    return [tuple(zip(*entries, strict=True)) for entries in kinds.values()]  # type: ignore[misc]


def _plain_settings(block: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (path, name): value
        for path, module in block.named_modules()
        for name, value in {**vars(module), "class": str(type(module))}.items()
        if isinstance(value, bool | int | str | tuple | None) and not name.startswith("_")
    }


def _tells_kind(values: list[Any]) -> bool:
    """Tell whether values of a setting make blocks different, and do not only number or name them."""
    different = len(set(map(repr, values)))
    if all(type(value) is int for value in values):
        return different > 1 and values != list(range(values[0], values[0] + len(values)))
    named = any(isinstance(value, str) for value in values)
    return 1 < different < len(values) + (not named)


# ---- running a model -----------------------------------------------------------------------------------


def call_model(model: nn.Module, example: Any) -> Any:
    """Run a model once in eval mode: no running statistics change and no random numbers are drawn.

    example: a tensor, a tuple of arguments, a dict of keyword arguments, or a function of the model.
    Raises a UserError where the model does not run.
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


@torch.no_grad()
def count_flops(model: nn.Module, example: Any) -> int:
    """Count the FLOPs of a forward pass; `example` as in `call_model`."""
    # A frame that runs in this mode first would never be compiled.
    with torch.compiler.set_stance("force_eager"), flop_counter() as counter:
        call_model(model, example)
    return int(counter.get_total_flops())


def find_form(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Form | None, bool]:
    """Return the form of a block's output, and whether values stand in it that the block made besides.

    The form is None where the block cannot be skipped. Values made besides may be needed by the next block.
    """
    inputs, entries = (*args, *kwargs.values()), output if type(output) is tuple else (output,)
    first = (*inputs[:1], *entries[:1])
    if len(first) < 2 or not all(isinstance(value, Tensor) for value in first):
        return None, False
    before, after = first
    # A nested tensor, as of nn.TransformerEncoder with a mask of padding, has no shape to compare.
    if before.is_nested != after.is_nested or not (before.is_nested or before.shape == after.shape):
        return None, False
    # Not by id(), which torch.compile would guard on: it would compile anew for every batch.
    own = [e if e is None else max([-1, *(k for k, v in enumerate(inputs) if v is e)]) for e in entries[1:]]
    form = (0, *(None if k == -1 else k for k in own)) if type(output) is tuple else ()
    return form, -1 in own


class FirstPass:
    """Hooks that learn from the first passes of a model what its blocks return.

    They raise a UserError for blocks that cannot be skipped. Each block has to go on with what the one before
    it returned; a block of another list may stand between them. That takes more passes where layers are left
    out at random. What was tried on an example has to return the same in training.
    """

    def __init__(self, lists: Sequence[BlockList], tried: bool = False) -> None:
        self.lists, self.tried = lists, tried
        # By thread (of nn.DataParallel) and list: its latest block, what that was given, outputs since.
        self._since: dict[int, dict[int, tuple[int, Any, list[Tensor]]]] = {}
        self._unseen: dict[int, set[int]] = {}  # by list that ran: blocks not seen behind the one before yet
        self._known: set[int] = set()
        self._handles = [
            block.register_forward_hook(partial(self._record, number, k), with_kwargs=True)
            for number, each in enumerate(lists)
            for k, block in enumerate(each.blocks)
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._unseen.clear()
        self.forget()

    def forget(self) -> None:
        """Drop the tensors of a pass."""
        self._since.clear()

    def find_unseen(self) -> str:
        """Name a list that ran and was not seen to be a chain, as experts of which one runs; "" without."""
        for number, missing in self._unseen.items():
            each, k = self.lists[number], min(missing, default=0)
            if k and not each.compiled:
                return str(_cannot(each.names[k], f"never went on with what {each.names[k - 1]} returned"))
        return ""

    def _record(self, number: int, k: int, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        compiling = torch.compiler.is_compiling()  # values are not known then, and nothing may be read
        if not compiling and number in self._known:
            return
        if self.tried and (compiling or not block.training):
            return
        each = self.lists[number]
        since = {} if compiling else self._since.setdefault(get_ident(), {})
        latest, before, outputs = since.get(number, (None, None, []))
        if k == 0 or (latest is None and not compiling):  # the first that runs: LayerDrop leaves out some
            form, made = find_form(args, kwargs, output)
            if self.tried and form != each.form:
                raise _cannot(each.names[k], "returns something else in training mode", "train it plainly")
            if form is None or (made and not self.tried):
                raise _cannot(each.names[k], "does not return one tensor, of the shape of its input")
            each.form = form
        if compiling:
            each.compiled = True
            return
        given, result = (*args, *kwargs.values())[0], output[0] if type(output) is tuple else output
        missing = self._unseen.setdefault(number, set() if self.tried else set(range(1, len(each))))
        if latest == k - 1 and k in missing:
            # The outputs of branches may have the values of their input, as where they begin at zero.
            beside = given is before and outputs[0] is not before
            if beside or not any(_is_same(given, one) for one in outputs):
                raise _cannot(each.names[k], f"does not go on with what {each.names[k - 1]} returned")
            missing.discard(k)
        if not missing and block.training:  # in eval mode another form may be returned
            self._known.add(number)
        since[number] = k, given, []
        if not missing or k == len(each) - 1:
            del since[number]
        for *_, others in since.values():
            others.append(result)


def _cannot(name: str, why: str, remedy: str = "give example= and such blocks are left alone") -> UserError:
    return UserError(f"{name} cannot be skipped, since it {why}; {remedy}")


def _is_same(value: Any, other: Any) -> bool:
    """Tell whether two tensors are one, or have the same values: wrappers such as FSDP pass on copies."""
    like = isinstance(value, Tensor) and not value.is_nested and value.shape == other.shape
    return value is other or (like and torch.allclose(value, other.to(value.dtype), equal_nan=True))


@dataclass(eq=False)
class _Call:
    """A call of a block in a pass over the example."""

    block: nn.Module
    given: Any  # its first argument
    form: Form | None
    made: bool
    leaf: Tensor | None  # begins the graph behind the block,
    result: Any  # which gets this tensor
    follows: bool = True  # it reads what the block before it returned, and nothing goes around that


def keep_skippable(model: nn.Module, lists: Sequence[BlockList], example: Any) -> list[BlockList]:
    """Keep the lists whose blocks run once each, one after another, and keep the shape of their input."""
    calls: list[_Call] = []
    list_of = {block: number for number, each in enumerate(lists) for block in each.blocks}
    earlier: dict[int, list[int]] = {}  # by list: its calls so far

    def record(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        form, made = find_form(args, kwargs, output)
        call = _Call(block, next(iter((*args, *kwargs.values())), None), form, made, None, None)
        own = earlier.setdefault(list_of[block], [])
        if own:
            before = [calls[index].leaf for index in own[:-1]]
            call.follows = _follows(call.given, calls[own[-1] :], before)
        own.append(len(calls))
        calls.append(call)
        if form is None:
            return None
        # Gradients behind a block begin at it: so what depends on its output depends on this leaf.
        value = output[0] if type(output) is tuple else output
        call.leaf = value.detach()
        if value.is_floating_point():
            call.leaf.requires_grad_()
        call.result = call.leaf.clone()
        return (call.result, *output[1:]) if type(output) is tuple else call.result

    with ExitStack() as hooks, torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        for block in list_of:
            hooks.enter_context(block.register_forward_hook(record, with_kwargs=True))
        output = call_model(model, example)
    kept = []
    for each in lists:
        run = [call for call in calls if call.block in each.blocks]
        (form, made), *others = {(call.form, call.made) for call in run} or {(None, False)}
        in_order = [call.block for call in run] == list(each.blocks) and all(call.follows for call in run)
        if in_order and form is not None and not others:
            each.form = form
            if not made or _ignores_rest(model, each, example, output):
                kept.append(each)
    return kept


def _follows(given: Any, calls: Sequence[_Call], before: Sequence[Any]) -> bool:
    """Tell whether an input depends on one of these calls, and on nothing that went around the first.

    before: the leaves of blocks of the list ahead of the first call
    """
    if any(given is call.result for call in calls):
        return True
    try:
        around = given is calls[0].given or _depends(given, [calls[0].given, *before])
        return not around and _depends(given, [call.leaf for call in calls])
    except RuntimeError:  # reentrant checkpointing refuses such gradients
        return any(call.result is not None and _is_same(given, call.result) for call in calls)


def _depends(value: Any, sources: Sequence[Any]) -> bool:
    """Tell whether a tensor was computed from one of the sources, as far as gradients show it."""
    known = [source for source in sources if isinstance(source, Tensor) and source.requires_grad]
    if not known or not isinstance(value, Tensor) or not value.requires_grad:
        return False
    found = torch.autograd.grad(value, known, torch.zeros_like(value), retain_graph=True, allow_unused=True)
    return any(gradient is not None for gradient in found)


@torch.no_grad()
def _ignores_rest(model: nn.Module, each: BlockList, example: Any, output: Any) -> bool:
    """Return whether a model has the same output without what blocks return besides the first tensor.

    True for attention weights that the caller did not ask for, False for the losses of a mixture of experts.
    """

    def leave_out(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entries: Any) -> Any:
        return (entries[0], *each.pass_on(args, kwargs)[1:])

    with ExitStack() as hooks:
        for block in each.blocks:
            hooks.enter_context(block.register_forward_hook(leave_out, with_kwargs=True))
        try:
            without = call_model(model, example)
        except UserError:  # the model needs what was left out; its own error would mislead
            return False
    values, others = tree_leaves(output), tree_leaves(without)
    if len(values) != len(others):
        return False
    pairs = [pair for pair in zip(values, others, strict=True) if isinstance(pair[0], Tensor)]
    return bool(pairs) and all(torch.allclose(*pair, equal_nan=True) for pair in pairs)


def resolve_order(order: str, first_size: int) -> str:
    """Return the order of copies in a list of which `first_size` blocks train first.

    The middle of fewer than FEWEST_FOR_MIDDLE is one block or none, and copies stand behind their sources.
    """
    return "interleaved" if order == "middle" and first_size < FEWEST_FOR_MIDDLE else order


def choose_active(count: int, sizes: Sequence[int], order: str) -> list[list[int]]:
    """Choose which of `count` blocks are active at each size; every set holds the one before it.

    middle: the first ones and the last; interleaved: spread evenly; stacked: the first ones.
    `order` comes from `resolve_order`.
    """
    chosen, wider = [], list(range(count))
    for size in reversed(sizes):
        if order == "interleaved":
            wider = [wider[k * len(wider) // size] for k in range(size)]
        else:
            wider = wider[:size] if order == "stacked" else [*wider[: size - 1], wider[-1]]
        chosen.append(wider)
    return chosen[::-1]


def copy_sources(old: Sequence[int], new: Sequence[int], order: str) -> list[tuple[int, int]]:
    """Pair every block that begins with the active one that it is a copy of, by their indices.

    middle: a b c b c b c d; interleaved: a a b b c c d d; stacked: a b c d a b c d.
    """
    begin = [k for k in new if k not in old]
    if order == "interleaved":
        return [(max(i for i in old if i < k), k) for k in begin]
    span = old if order == "stacked" else old[1:-1]
    return [(span[place % len(span)], k) for place, k in enumerate(begin)]


def same_blocks(model: Any, lists: Sequence[BlockList]) -> list[BlockList]:
    """Return the blocks of another model under the same names, as in an average of the weights."""
    found = model.named_modules() if isinstance(model, nn.Module) else ()
    modules = {name.replace("_orig_mod.", ""): module for name, module in found}  # of torch.compile
    prefix = "module." if "module." + lists[0].names[0] in modules else ""  # of AveragedModel
    missing = [name for each in lists for name in each.names if prefix + name not in modules]
    if missing:
        raise UserError(f"{type(model).__name__} in also= has no module {missing[0]}; give a list of copies")
    same = [tuple(modules[prefix + name] for name in each.names) for each in lists]
    return [BlockList(each.names, blocks, leader=each) for each, blocks in zip(lists, same, strict=True)]
