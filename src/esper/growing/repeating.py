"""Blocks of a user's own list, repeated: a copy behind the block, heard by degrees, then one more entry."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from esper.growing.places import has_weights, is_sequence, tensor_of

COUNT = "num_hidden_layers"  # where the configurations of transformers count the blocks
INDEX = "layer_idx"  # where their blocks say which one they are


class CannotRepeat(Exception):
    """Why nothing can be repeated behind a module."""


@dataclass(frozen=True)
class Span:
    """Entries of a list or a sequence that follow one another and keep the shape of what runs through."""

    owner: nn.Module | None  # of the list
    container: nn.Module
    blocks: tuple[nn.Module, ...]
    counted: bool = False  # whether numbers of the owner that count the blocks must follow


def find_span(model: nn.Module, module: nn.Module, shapes: Mapping[nn.Module, tuple[Any, Any]]) -> Span:
    """Find what a copy behind this module would repeat; raises CannotRepeat where there is nothing.

    In a sequence it is the shortest run of entries up to the module that has weights and keeps the shape; in
    a list the module itself.
    """
    found = next(((n, m) for n, m in model.named_modules() if _holds(m, module)), None)
    if found is None:
        raise CannotRepeat("it is no entry of a ModuleList or Sequential")
    name, container = found
    owner = model.get_submodule(name.rpartition(".")[0]) if name else None
    entries = list(container.children())
    last = entries.index(module)
    firsts = range(last, -1, -1) if is_sequence(container) else [last]
    for first in firsts:
        blocks = tuple(entries[first : last + 1])
        if not all(block in shapes for block in blocks):
            raise CannotRepeat("not all entries of its sequence run")
        if shapes[blocks[0]][0] == shapes[module][1] and any(has_weights(block) for block in blocks):
            return Span(owner, container, blocks)
    given, gave = (None if shape is None else list(shape) for shape in shapes[module])
    raise CannotRepeat(
        f"no weights ahead of it keep the shape of their input (it reads {given}, gives {gave})"
    )


def _holds(container: nn.Module, module: nn.Module) -> bool:
    listed = isinstance(container, nn.ModuleList) or is_sequence(container)
    return listed and any(child is module for child in container.children())


class Repeat(nn.Module):
    """Copies of blocks as a seed: at full strength the blocks run twice."""

    def __init__(self, span: Span):
        super().__init__()
        self.span = span
        configs = {id(c): c for block in span.blocks for c in configs_of(block)}  # shared, not copied
        self.blocks = nn.ModuleList(copy.deepcopy(block, dict(configs)) for block in span.blocks)
        self.requires_grad_(True)

    def copy_modes(self) -> None:
        """Give every part of the copies the train or eval mode of the part that it was copied from."""
        for block, origin in zip(self.blocks, self.span.blocks, strict=True):
            modes = {name: part.training for name, part in origin.named_modules()}
            for name, part in block.named_modules():
                part.training = modes.get(name, part.training)

    def forward(self, h: Tensor, *inputs: Any, **named: Any) -> Tensor:
        """What the copies make of an activation."""
        for block in self.blocks:
            found = tensor_of(block(h, *inputs, **named))
            assert found is not None, "a block that is repeated hands on a tensor"
            h = found
        return h

    def output(self, h: Tensor, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
        """What the copies make of h, called with what else the block was called with.

        A cache of keys and values is the block's alone.
        """
        rest = {key: _uncached(value) for key, value in named.items()}
        if not inputs:
            main = next(key for key, x in rest.items() if isinstance(x, Tensor) and x.shape == h.shape)
            rest.pop(main)
        result: Tensor = self(h, *(_uncached(value) for value in inputs[1:]), **rest)
        return result


def _uncached(value: Any) -> Any:
    return None if hasattr(value, "get_seq_length") else value


def configs_of(module: nn.Module) -> Iterator[Any]:
    """The configurations that a module and its parts refer to, each once."""
    seen: set[int] = set()
    for part in module.modules():
        config = vars(part).get("config")
        if config is not None and hasattr(config, "__dict__") and id(config) not in seen:
            seen.add(id(config))
            yield config


def touched_by(model: nn.Module, span: Span) -> list[Any]:
    """Everything that `insert` may change."""
    owners = [] if span.owner is None else [span.owner]
    return [span.container, *owners, *configs_of(model), *span.container.modules()]


def insert(model: nn.Module, span: Span, blocks: Sequence[nn.Module]) -> nn.Module:
    """Put blocks behind a span, in place, and let what counts or numbers blocks follow; the last of them."""
    container, entries = span.container, list(span.container.children())
    last, count = entries.index(span.blocks[-1]), len(entries)
    first = last + 1 - len(blocks)
    for block, origin in zip(blocks, entries[first : last + 1], strict=True):
        copies = dict(block.named_modules())
        for name, part in origin.named_modules():
            if isinstance(vars(part).get(INDEX), int) and name in copies:
                setattr(copies[name], INDEX, getattr(part, INDEX))  # it may have moved since it was copied
    before = [(entry, k) for k, entry in enumerate(entries)]
    before[last + 1 : last + 1] = [(block, first + k) for k, block in enumerate(blocks)]
    keys = list(container._modules)
    container._modules.clear()
    for place, (entry, was) in enumerate(before):
        container._modules[_key(container, keys, place, last, len(blocks))] = entry
        for part in entry.modules():
            if isinstance(vars(part).get(INDEX), int):
                setattr(part, INDEX, getattr(part, INDEX) + place - was)
    for config in configs_of(model):
        if getattr(config, COUNT, None) == count:
            setattr(config, COUNT, count + len(blocks))
            for name, value in list(vars(config).items()):
                if isinstance(value, list) and len(value) == count and "layer" in name:
                    setattr(config, name, [value[was] for _, was in before])
    if span.counted and span.owner is not None:
        for name, value in list(vars(span.owner).items()):
            if type(value) is int and value == count:
                setattr(span.owner, name, count + len(blocks))
    return blocks[-1]


def _key(container: nn.Module, keys: list[str], place: int, last: int, more: int) -> str:
    """The name of an entry after some were put behind entry `last`."""
    if all(key.isdigit() for key in keys):
        return str(place)
    if place <= last:
        return keys[place]
    if place > last + more:
        return keys[place - more]
    name = f"{keys[place - more]}_again"
    while name in keys or name in container._modules:
        name += "_again"
    return name
