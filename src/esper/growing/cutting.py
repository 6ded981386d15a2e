"""A user's model, cut into a host: segments with a slot after each, and a head.

    pieces = cut(model, sample)                       # slots are found
    pieces = cut(model, sample, slots=["block1", 4])  # or named

The model's class is not touched and need not be ours: its forward is traced once, on a copy.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from esper.foundation.errors import UserError
from esper.growing.joints import Joint, Joints
from esper.growing.places import expanded
from esper.growing.tracing import Traced, observe, trace
from esper.growing.undoing import at_rest
from esper.population.hosts import Host


@dataclass(frozen=True)
class Cut:
    """A model in pieces, and the way back."""

    original: nn.Module  # a copy of the user's, as it was
    traced: fx.GraphModule
    joints: tuple[Joint, ...]
    host: Host
    keys: tuple[dict[str, str], ...]  # of every segment and the head: its tensor names → the model's
    causal: bool  # whether every joint hears only earlier positions of its input

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The user's submodules after which something may grow."""
        return tuple(joint.name for joint in self.joints)


def cut(
    model: nn.Module,
    sample: Tensor,
    slots: Sequence[str | int] | None = None,
    topology: str | None = None,
) -> Cut:
    """Cut a copy of the model at the named slots, or where slots are found.

    sample [B, *input_shape], B at least 2. A slot's name is that of the submodule after which it lies.
    """
    names = None if slots is None else expanded(model, slots)
    own = _without_fast_paths(_freeze(copy.deepcopy(model).to("cpu")))
    samples = (sample[:2], torch.cat([sample[:2], sample[:1]]))
    traced = observe(trace(own, names or (), samples), samples)
    places = Joints(traced, topology)
    joints = places.found() if names is None else places.named(names)
    if not joints:
        raise UserError(
            f"{type(model).__name__} has no joint of topology {topology!r}; leave topology out, or name slots"
        )
    result = traced.first[traced.nodes[-1]]
    if not isinstance(result, Tensor) or result.shape[:1] != sample[:2].shape[:1]:
        given = f"shape {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise UserError(
            f"{type(model).__name__} returns {given}; it must return one tensor whose first axis is the "
            "batch: wrap it in a module that returns the logits alone"
        )
    segments = _segments(traced, joints)
    keys = tuple(_keys(segment, own) for segment in segments)
    _refuse_shared(keys, type(model).__name__)
    host = Host(
        segments[:-1],
        joints[0].topology,
        segments[-1],
        [joint.width for joint in joints],
        joints[0].spatial_dims,
    )
    host.joint_shapes = tuple(joint.shape for joint in joints)
    causal = host.topology == "transformer" and hears_the_past_alone(host, sample)
    return Cut(copy.deepcopy(model).to("cpu"), traced.module, tuple(joints), host, keys, causal)


def hears_the_past_alone(host: Host, sample: Tensor) -> bool:
    """Whether a change of the last position of the input leaves all earlier ones of every joint as they were.

    sample [B, time, ...], tokens or vectors. False where the positions of a joint are not those of the input.
    """
    if sample.ndim not in (2, 3) or sample.shape[1] < 2:
        return False
    time, values, other = sample.shape[1], sample.unique(), sample.clone()
    last = sample[:, -1]
    token = torch.where(last == values[0], values[-1], values[0])
    other[:, -1] = last + 1 if sample.is_floating_point() else token
    with at_rest(host):
        for segment in host.segments:
            sample, other = segment(sample), segment(other)
            if sample.shape[1] != time or not torch.allclose(sample[:, :-1], other[:, :-1], atol=1e-5):
                return False
    return True


def _freeze(model: nn.Module) -> nn.Module:
    """Parameters that do not want a gradient become buffers: carried along, never trained."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not parameter.requires_grad:
                del module._parameters[name]
                module.register_buffer(name, parameter.detach())
    return model


def _without_fast_paths(model: nn.Module) -> nn.Module:
    """torch's fused inference kernels for encoder layers do not run over rows of weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
    return model


def _segments(traced: Traced, joints: Sequence[Joint]) -> list[nn.Module]:
    """One module for each stretch of the graph: up to each joint, and the head."""
    nodes = [node for node in traced.nodes if node.op not in ("placeholder", "output")]
    start: fx.Node = next(node for node in traced.nodes if node.op == "placeholder")
    ends = [joint.node for joint in joints] + [cast(fx.Node, traced.nodes[-1].args[0])]
    places = [nodes.index(end) for end in ends]
    if len(set(places)) != len(places):
        raise UserError(f"two slots of {type(traced.module).__name__} are the same place; name each once")
    segments, first = [], 0
    for end, place in zip(ends, places, strict=True):
        segments.append(_segment(traced, nodes[first : place + 1], start, end))
        start, first = end, place + 1
    return segments


def _segment(traced: Traced, nodes: Sequence[fx.Node], start: fx.Node, end: fx.Node) -> nn.Module:
    chain = _chain(traced.module, nodes, start)
    if chain is not None:
        return chain
    graph = fx.Graph()
    known: dict[fx.Node, Any] = {start: graph.placeholder("x")}
    root = nn.Module()
    root.__dict__["_modules"] = dict(traced.module._modules)
    root.__dict__["_parameters"] = dict(traced.module._parameters)
    root.__dict__["_buffers"] = dict(traced.module._buffers)

    def argument(node: fx.Node) -> Any:
        """A value from this segment, or one from before it that is the same for all data."""
        if node not in known:
            known[node] = _carried(traced, node, graph, root)
        return known[node]

    for node in nodes:
        if node.users or node is end:
            known[node] = graph.node_copy(node, argument)
    graph.output(known[end])
    return fx.GraphModule(root, graph)


def _carried(traced: Traced, node: fx.Node, graph: fx.Graph, root: nn.Module) -> Any:
    if node.op == "get_attr":
        return graph.get_attr(str(node.target))
    value = traced.first[node]
    if isinstance(value, Tensor):
        root.register_buffer(f"carried_{node.name}", value.clone())
        return graph.get_attr(f"carried_{node.name}")
    return value


def _chain(root: nn.Module, nodes: Sequence[fx.Node], start: fx.Node) -> nn.Sequential | None:
    """Layers that follow one another, as a plain sequence: the form that runs fastest over rows."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    before = start
    for node in nodes:
        if node.op != "call_module" or node.args != (before,) or node.kwargs:
            return None
        layer = root.get_submodule(str(node.target))
        weights = [p for p in layer.parameters()]
        frozen = any(
            not isinstance(b, nn.Parameter) and n in ("weight", "bias") for n, b in layer.named_buffers()
        )
        if frozen or (weights and any(layer is other for other in parts.values())):
            return None
        parts[f"{len(parts)}_{str(node.target).replace('.', '_')}"] = layer
        before = node
    return nn.Sequential(parts) if parts else None


def _keys(segment: nn.Module, model: nn.Module) -> dict[str, str]:
    """The names of a segment's tensors in the model."""
    tensors = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    own = [*segment.named_parameters(), *segment.named_buffers()]
    return {name: tensors[id(t)] for name, t in own if id(t) in tensors}


def _refuse_shared(keys: Sequence[dict[str, str]], kind: str) -> None:
    seen: set[str] = set()
    for part in keys:
        twice = sorted(seen & set(part.values()))
        if twice:
            raise UserError(
                f"{kind} uses {twice[0]} on both sides of a slot (tied or reused weights), where a cut would "
                "untie it; give each part weights of its own, or put no slot between them"
            )
        seen |= set(part.values())
