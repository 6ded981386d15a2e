"""A model's forward pass as a graph, and what every step of it gave for two samples.

Tracing stops at the layers of torch and at a model's own blocks; it opens the model itself, plain sequences,
modules that hold a list of blocks, and whatever lies on the way to a slot that was asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import _maybe_revert_all_patches

from esper.foundation.errors import UserError, one_line
from esper.growing.undoing import at_rest

ADVICE = "give an nn.Sequential, or a model whose forward calls its blocks one after another"

# Made from sizes, so that a traced size reaches them instead of a number.
_FACTORIES: tuple[Callable[..., Any], ...] = (torch.arange, torch.zeros, torch.ones, torch.full)
# Whether these act is fixed when they are traced, so a traced model would drop out for ever or never.
_MODE_BOUND = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout, F.batch_norm)


class _Recorder(fx.Interpreter):
    """Runs a graph and remembers every value."""

    def __init__(self, module: nn.Module, graph: fx.Graph | None = None):
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]

    @torch.no_grad()
    def up_to_now(self, sample: Tensor) -> dict[fx.Node, Any]:
        """The values of a graph that is still being drawn."""
        self.args_iter = iter([sample])
        for node in self.graph.nodes:
            self.env[node] = self.run_node(node)
        return self.values


class BlockTracer(fx.Tracer):
    """Opens only the modules it was told to open, and answers questions about sizes by the samples."""

    def __init__(self, opened: frozenset[str], samples: Sequence[Tensor]):
        super().__init__(autowrap_functions=_FACTORIES)
        self._autowrap_search.append(torch)
        self._opened = opened
        self._samples = samples

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A branch that asks for a size (`if t > self.context: raise`) is taken as for the samples."""
        with _maybe_revert_all_patches():
            answers = [_Recorder(self.root, self.graph).up_to_now(x)[obj.node] for x in self._samples]
        if isinstance(answers[0], Tensor) or answers[0] != answers[1]:
            return bool(super().to_bool(obj))
        return bool(answers[0])


def is_sequence(module: nn.Module) -> bool:
    """Whether a module is no more than its children, one after another."""
    return type(module).forward is nn.Sequential.forward


def opened_modules(model: nn.Module, slots: Iterable[str]) -> frozenset[str]:
    """The modules that a trace looks into."""
    modules = dict(model.named_modules())
    lists = [
        name for name, module in modules.items() if isinstance(module, nn.ModuleList) and len(module) > 1
    ]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    wanted = [*slots, *outermost]
    return frozenset(
        name
        for name, module in modules.items()
        if is_sequence(module) or any(path.startswith(f"{name}.") for path in wanted)
    )


def trace(model: nn.Module, slots: Iterable[str], samples: Sequence[Tensor]) -> fx.GraphModule:
    """The forward pass of a model with one input and one output, as a graph over its own modules."""
    kind = type(model).__name__
    try:
        graph = BlockTracer(opened_modules(model, slots), samples).trace(model)
    except Exception as error:  # whatever a stranger's forward raises when it is shown a stand-in
        raise UserError(
            f"{kind} cannot be cut, because its forward cannot be traced ({one_line(error)}); {ADVICE}"
        ) from error
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    needed = [node for node in inputs if not node.args]
    if len(needed) > 1 or not inputs:
        raise UserError(
            f"{kind} takes {len(needed)} inputs ({', '.join(n.name for n in needed)}); a model that grows "
            "takes one tensor: wrap it in a module whose forward does"
        )
    for node in graph.nodes:
        node.meta.pop("is_wrapped", None)  # else the module's code would wrap these functions for everyone
        node.type = None  # an annotation that is only a string cannot be pickled
        if node.op == "call_function" and node.target in _MODE_BOUND:
            raise UserError(
                f"{kind} calls {node.target.__name__} as a function, which a traced model cannot switch off; "
                "use the layer (nn.Dropout, nn.BatchNorm2d ...) instead"
            )
    return fx.GraphModule(model, _without_spare_inputs(graph), class_name=kind)


def _without_spare_inputs(graph: fx.Graph) -> fx.Graph:
    """Inputs with a default are left out, and their default put in their place."""
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.args]:

        def default(source: fx.Node, gone: fx.Node = node) -> Any:
            return gone.args[0] if source is gone else source

        for user in list(node.users):
            user.args = fx.node.map_arg(user.args, default)
            user.kwargs = fx.node.map_arg(user.kwargs, default)
        graph.erase_node(node)
    return graph


@dataclass(frozen=True)
class Traced:
    """A graph, and the value of every node for two batches of different sizes."""

    module: fx.GraphModule
    first: dict[fx.Node, Any]
    second: dict[fx.Node, Any]
    learned: frozenset[fx.Node]  # nodes that depend on a parameter

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.module.graph.nodes)

    def is_constant(self, node: fx.Node) -> bool:
        """Whether a node has the same value whatever the data are, and nothing in it is learned."""
        return node not in self.learned and same(self.first[node], self.second[node])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def observe(module: fx.GraphModule, samples: Sequence[Tensor]) -> Traced:
    """Run two samples of different batch sizes through a traced model."""
    values = []
    for sample in samples:
        recorder = _Recorder(module)
        try:
            with at_rest(module):
                recorder.run(sample)
        except Exception as error:
            raise UserError(
                f"{type(module).__name__} does not take inputs of shape {list(sample.shape)} and type "
                f"{sample.dtype} ({one_line(error)}); make the data fit its first layer"
            ) from error
        values.append(recorder.values)
    return Traced(module, values[0], values[1], _learned(module))


def _learned(module: fx.GraphModule) -> frozenset[fx.Node]:
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        own = False
        if node.op == "call_module":
            own = any(True for _ in module.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            own = isinstance(attrgetter(str(node.target))(module), nn.Parameter)
        if own or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return frozenset(found)
