"""New modules in a user's model: copies of its own blocks as further entries of their list, and seeds as
plain modules of torch's layers and functions, which load without esper. `Undo` takes such changes back.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from esper.growing.slots import ModuleCall, SlotSpec, has_weights, is_sequence, main_tensor
from esper.population.extract import Grafted
from esper.utils.errors import UserError

CONFIG_COUNT = "num_hidden_layers"  # where the configurations of transformers count the blocks
BLOCK_INDEX = "layer_idx"  # where their blocks hold their own number


class Undo:
    """A copy of the attributes of some objects, and of the dictionaries among these; call it to restore them.

    The train or eval mode of a module is left as it is.
    """

    def __init__(self, objects: Iterable[Any]):
        unique = {id(thing): thing for thing in objects}
        self._saved = [(thing, _copy_dicts(vars(thing))) for thing in unique.values()]

    def __call__(self) -> None:
        """Restore the attributes."""
        for thing, attributes in self._saved:
            own = vars(thing)
            mode = {key: own[key] for key in ("training",) if key in own}
            own.clear()
            own.update(_copy_dicts(attributes) | mode)


def _copy_dicts(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.copy(value) if isinstance(value, dict) else value for key, value in attributes.items()}


# ---- copies of blocks ----------------------------------------------------------------------------------


class CannotRepeat(Exception):
    """Raised with the reason why nothing can be repeated behind a module."""


@dataclass(frozen=True)
class BlockSpan:
    """Consecutive entries of a ModuleList or Sequential that keep the shape of their input."""

    container: nn.Module
    blocks: tuple[nn.Module, ...]


def find_span(model: nn.Module, module: nn.Module, calls: Mapping[nn.Module, ModuleCall]) -> BlockSpan:
    """Find the blocks that a copy behind `module` repeats; raises CannotRepeat where there are none.

    In a sequence they are the shortest run of entries up to the module that has weights and keeps the shape,
    in a list the module itself. calls: of each module that ran.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) or is_sequence(m)]
    container = next((m for m in lists if any(child is module for child in m.children())), None)
    if container is None:
        raise CannotRepeat("it is no entry of a ModuleList or Sequential")
    entries = list(container.children())
    last = entries.index(module)
    for first in range(last, -1, -1) if is_sequence(container) else [last]:
        blocks = tuple(entries[first : last + 1])
        if not all(block in calls for block in blocks):
            raise CannotRepeat("not all entries of its sequence run")
        if calls[blocks[0]].given == calls[module].shape and any(has_weights(block) for block in blocks):
            return BlockSpan(container, blocks)
    given, gave = (x and list(x) for x in (calls[module].given, calls[module].shape))
    raise CannotRepeat(f"no weights ahead of it keep the shape of their input (reads {given}, gives {gave})")


class RepeatedBlocks(nn.Module):
    """Copies of blocks as a seed: at alpha 1 the blocks run twice."""

    def __init__(self, span: BlockSpan):
        super().__init__()
        self.span = span
        configs = {id(c): c for block in span.blocks for c in configs_of(block)}  # shared, not copied
        self.blocks = nn.ModuleList(copy.deepcopy(block, dict(configs)) for block in span.blocks)
        self.requires_grad_(True)

    def forward(self, h: Tensor, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
        """Run the copies on h with the other arguments of the last block, but without its cache."""
        rest = {key: _without_cache(value) for key, value in named.items()}
        if not inputs:
            rest.pop(next(key for key, x in rest.items() if isinstance(x, Tensor) and x.shape == h.shape))
        for block in self.blocks:
            output = main_tensor(block(h, *(_without_cache(value) for value in inputs[1:]), **rest))
            assert output is not None, "a block that is repeated returns a tensor"
            h = output
        return h


def _without_cache(value: Any) -> Any:
    return None if hasattr(value, "get_seq_length") else value


def configs_of(module: nn.Module) -> list[Any]:
    """Return the configuration objects of transformers that a module and its parts refer to, each once."""
    found = [vars(part).get("config") for part in module.modules()]
    return list({id(c): c for c in found if c is not None and hasattr(c, "__dict__")}.values())


def insert_blocks(model: nn.Module, span: BlockSpan, blocks: Sequence[nn.Module]) -> nn.Module:
    """Insert blocks behind a span in place, and update what counts or numbers blocks; return the last one."""
    container, entries = span.container, list(span.container.children())
    keys, count = list(container._modules), len(entries)
    last = entries.index(span.blocks[-1])
    first = last + 1 - len(blocks)
    # The former number of each entry or, of a copy, that of its origin.
    origins = [*range(last + 1), *range(first, count)]
    for key in keys[first : last + 1]:
        keys.append(_free_name(f"{key}_again", keys))
    names = [*keys[: last + 1], *keys[count:], *keys[last + 1 : count]]
    if all(key.isdigit() for key in keys[:count]):
        names = [str(index) for index in range(len(names))]
    container._modules.clear()
    for index, entry in enumerate([*entries[: last + 1], *blocks, *entries[last + 1 :]]):
        container._modules[names[index]] = entry
        for part in entry.modules():
            if isinstance(vars(part).get(BLOCK_INDEX), int):
                setattr(part, BLOCK_INDEX, index)
    for config in configs_of(model):
        if getattr(config, CONFIG_COUNT, None) == count:
            setattr(config, CONFIG_COUNT, len(names))
            for name, value in list(vars(config).items()):
                if isinstance(value, list) and len(value) == count and "layer" in name:
                    setattr(config, name, [value[before] for before in origins])
    return blocks[-1]


def _free_name(name: str, taken: Iterable[str]) -> str:
    return name if name not in taken else _free_name(f"{name}_again", taken)


# ---- seeds as plain modules ----------------------------------------------------------------------------


def trace_graft(grafted: Grafted) -> fx.GraphModule:
    """Return a seed with its blending as a traced module; raises a UserError where it cannot be traced."""
    traced = copy.deepcopy(grafted)
    try:
        graph = fx.Tracer().trace(traced)
    except (fx.proxy.TraceError, TypeError, RuntimeError, AttributeError) as error:
        raise UserError(
            f"the blueprint {type(grafted.seed).__name__} cannot be traced ({error}), so that it would need "
            "esper to be loaded; write its forward without asking for sizes"
        ) from error
    for node in graph.nodes:
        node.type = None  # an annotation that is only a string cannot be pickled
    return fx.GraphModule(traced, graph, class_name="Grown")


def graft_name(model: nn.Module, slot: SlotSpec) -> str:
    """Return the name that a graft behind a submodule gets in the model."""
    owner, _, own = slot.name.rpartition(".")
    parent, module = model.get_submodule(owner), model.get_submodule(slot.name)
    if is_sequence(parent) and not is_sequence(module) and not slot.in_tuple:
        return f"{owner}.{own}_grown" if owner else f"{own}_grown"
    return f"{slot.name}.grown"


def install_graft(model: nn.Module, name: str, in_tuple: bool, graft: nn.Module) -> nn.Module:
    """Put a traced graft behind the submodule of a name, in place; return the module whose output it changes.

    Behind a layer of a sequence it becomes the next entry, behind a whole sequence its last one. Anywhere
    else it becomes a child `grown` of the submodule, which a forward hook runs: a traced module, so that the
    model can be copied, pickled and exported with torch alone.
    """
    module = model.get_submodule(name)
    owner, _, own = name.rpartition(".")
    parent = model.get_submodule(owner)
    if is_sequence(module):
        module.add_module(_free_name("grown", module._modules), graft)
        return module
    if is_sequence(parent) and not in_tuple:
        entries = list(parent._modules.items())
        new = _free_name(f"{own}_grown", parent._modules)
        parent._modules.clear()
        for key, child in entries:
            parent._modules[key] = child
            if key == own:
                parent._modules[new] = graft
        return graft
    hook = _trace_hook(graft, in_tuple)
    module.add_module(_free_name("grown", module._modules), hook)
    module.register_forward_hook(hook)
    return module


def _trace_hook(graft: nn.Module, in_tuple: bool) -> fx.GraphModule:
    """Return a forward hook as a traced module: (module, inputs, output) → the output with the graft."""
    root, graph = nn.Module(), fx.Graph()
    root.add_module("graft", graft)
    graph.placeholder("module")
    graph.placeholder("inputs")
    output = graph.placeholder("output")
    if in_tuple:
        first = graph.call_function(operator.getitem, (output, 0))
        rest = graph.call_function(operator.getitem, (output, slice(1, None)))
        graph.output(graph.call_function(operator.add, ((graph.call_module("graft", (first,)),), rest)))
    else:
        graph.output(graph.call_module("graft", (output,)))
    return fx.GraphModule(root, graph, class_name="Grown")
