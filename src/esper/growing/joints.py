"""Where a model can be cut: the values through which everything flows, and the choice among them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from esper.foundation.errors import UserError
from esper.growing.places import Place, block_ends, check_one_kind, sequence_topology, spread, usual_kind
from esper.growing.tracing import ADVICE, Traced

_RESHAPING_LAYERS = (nn.Flatten, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_RESHAPING_CALLS = {torch.flatten, torch.mean, F.adaptive_avg_pool2d, F.adaptive_avg_pool1d, "mean"}
_RESHAPING_CALLS |= {"flatten", "view", "reshape", torch.reshape}


@dataclass(frozen=True)
class Joint(Place):
    """A value at which a model is cut and a seed may live."""

    node: fx.Node = field(kw_only=True)


class Joints:
    """The joints of a traced model."""

    def __init__(self, traced: Traced, topology: str | None = None):
        self.traced = traced
        self.kind = type(traced.module).__name__
        self.topology = topology
        self.nodes = traced.nodes
        self._place = {node: i for i, node in enumerate(self.nodes)}
        self._last_use = [max((self._place[u] for u in n.users), default=i) for n, i in self._place.items()]

    def crossing(self, node: fx.Node) -> list[fx.Node]:
        """What else is needed after a node, besides its value and constants."""
        at = self._place[node]
        return [
            other
            for i, other in enumerate(self.nodes[: at + 1])
            if other is not node
            and self._last_use[i] > at
            and not (other.op == "get_attr" and self._first_use(other) > at)
            and not self.traced.is_constant(other)
        ]

    def _first_use(self, node: fx.Node) -> int:
        return min(self._place[user] for user in node.users)

    def joint(self, node: fx.Node, name: str | None = None) -> Joint | None:
        """The joint at a node, if its value is a batch of activations that a seed could work on."""
        value, other = self.traced.first[node], self.traced.second[node]
        if node.op in ("placeholder", "output", "get_attr") or not isinstance(value, Tensor):
            return None
        if node is self.nodes[-1].args[0]:
            return None
        fits = (
            value.is_floating_point()
            and 2 <= value.ndim <= 4
            and value.shape[1:] == other.shape[1:]
            and value.shape[0] != other.shape[0]
        )
        if not fits or self.crossing(node):
            return None
        return Joint(name or slot_name(node), self._topology(value), tuple(value.shape[1:]), node=node)

    def _topology(self, value: Tensor) -> str:
        if value.ndim != 3:
            return "mlp" if value.ndim == 2 else "cnn"
        return self.topology or sequence_topology(self.traced.module)

    # ---- choosing --------------------------------------------------------------------------------------

    def found(self) -> list[Joint]:
        """Joints at the ends of blocks: the last one before each further layer with weights."""
        layers = [(node, self._layer(node)) for node in self.nodes]
        chosen = block_ends((layer, self._reshapes(node, layer), self.joint(node)) for node, layer in layers)
        if not chosen:
            raise UserError(
                f"{self.kind} has no place for a slot between two of its layers; {ADVICE}, and at least two "
                "of them"
            )
        favourite = self.topology or usual_kind(chosen)
        return spread([joint for joint in chosen if joint.topology == favourite])

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return self.traced.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _reshapes(self, node: fx.Node, layer: nn.Module | None) -> bool:
        return isinstance(layer, _RESHAPING_LAYERS) or (
            node.op in ("call_function", "call_method") and node.target in _RESHAPING_CALLS
        )

    def named(self, names: Sequence[str]) -> list[Joint]:
        """The joints after the modules of these names, in the order of the forward pass."""
        joints = [self._named(name) for name in names]
        check_one_kind(joints, self.kind)
        return sorted(joints, key=lambda joint: self._place[joint.node])

    def _named(self, name: str) -> Joint:
        calls = [n for n in self.nodes if n.op == "call_module"]
        under = [n for n in calls if n.target == name or str(n.target).startswith(f"{name}.")]
        if not under:
            known = ", ".join(dict.fromkeys(str(n.target) for n in calls))
            raise UserError(f"slot {name!r} is no module that {self.kind} calls; it calls {known}")
        node = _tensor_of(under[-1], self.traced.first)
        joint = self.joint(node, name)
        if joint is None:
            raise UserError(self._refusal(name, node))
        return joint

    def _refusal(self, name: str, node: fx.Node) -> str:
        value = self.traced.first[node]
        if node is self.nodes[-1].args[0]:
            return f"{self.kind} cannot have a slot after {name!r}, its last layer; name a layer before it"
        others = [other.name for other in self.crossing(node)]
        if isinstance(value, Tensor) and others:
            return (
                f"{self.kind} cannot be cut after {name!r}: {', '.join(others[:3])} "
                f"{'goes' if len(others) == 1 else 'go'} past it (a skip connection); put the slot after "
                "the block that joins them"
            )
        given = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        return (
            f"{self.kind} cannot have a slot after {name!r}, which gives {given}; a slot needs one float "
            "tensor [batch, features], [batch, time, features] or [batch, channels, *spatial]"
        )


def slot_name(node: fx.Node) -> str:
    """The module that a value comes from, or the name of the operation."""
    source = node.args[0] if node.target is operator.getitem else node
    return str(source.target) if isinstance(source, fx.Node) and source.op == "call_module" else node.name


def _tensor_of(node: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
    """The tensor that a block hands on: its first item where it returns several."""
    if isinstance(values[node], Tensor):
        return node
    for user in node.users:
        if user.op == "call_function" and user.target is operator.getitem and user.args[1] == 0:
            return user
    return node
