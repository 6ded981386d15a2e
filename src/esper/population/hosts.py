"""Hosts: ordinary networks, cut into segments, with a slot at the joint after each segment.

    host = Host(segments=[stem, body, tail], topology="cnn", head=classifier, width=8, spatial_dims=2)
    host.validate(images[:2])

Any `nn.Module` may be a segment as long as it is a pure function of its input and its parameters: members run
under `vmap`, so there is no in-place arithmetic and no branch on a tensor's value. GroupNorm and LayerNorm
keep samples apart; BatchNorm does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

# Axes of an activation besides its spatial ones, and the axis of its channels.
TOPOLOGY_AXES: dict[str, tuple[int, int]] = {"cnn": (2, 1), "mlp": (2, -1), "transformer": (3, -1)}
TOPOLOGY_LAYOUT: dict[str, str] = {
    "cnn": "[batch, channels, *spatial]",
    "mlp": "[batch, features]",
    "transformer": "[batch, time, features]",
}


class Host(nn.Module):
    """Segments in a row, a slot after each, and a head after the last slot."""

    def __init__(
        self,
        segments: Sequence[nn.Module],
        topology: str,
        head: nn.Module,
        width: int | Sequence[int],
        spatial_dims: int = 0,
    ) -> None:
        super().__init__()
        if topology not in TOPOLOGY_AXES:
            raise ValueError(f"topology is {topology!r}; allowed are {', '.join(TOPOLOGY_AXES)}")
        if not segments:
            raise ValueError("segments is empty; give at least one segment: a host has a slot after each")
        widths = (width,) * len(segments) if isinstance(width, int) else tuple(width)
        if len(widths) != len(segments) or min(widths) < 1:
            raise ValueError(
                f"width is {width} for {len(segments)} segments; give one positive number, or one per segment"
            )
        allowed_dims = (1, 2) if topology == "cnn" else (0,)
        if spatial_dims not in allowed_dims:
            raise ValueError(
                f"spatial_dims is {spatial_dims} for a {topology} host; allowed are {allowed_dims}"
            )
        self.segments = nn.ModuleList(segments)
        self.head = head
        self.topology = topology
        self.widths = widths  # of the joint after each segment
        self.spatial_dims = spatial_dims
        self.joint_shapes: tuple[tuple[int, ...], ...] = ()  # of one sample at each joint; set by `validate`

    @property
    def num_slots(self) -> int:
        return len(self.segments)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        for segment in self.segments:
            x = segment(x)
        result: Tensor = self.head(x)
        return result

    @torch.no_grad()
    def validate(self, sample: Tensor, num_classes: int | None = None) -> Host:
        """Run a sample through, record the shape of every joint, and refuse parts that do not fit each other.

        sample [B, *input_shape], B at least 1
        """
        shapes: list[tuple[int, ...]] = []
        x, source = sample, "the sample"
        for index, segment in enumerate(self.segments):
            x = _run(segment, x, f"segment {index}", source)
            self._check_joint(index, x)
            shapes.append(tuple(x.shape[1:]))
            source = f"segment {index}"
        logits = _run(self.head, x, "the head", source)
        expected_axes = 3 if self.topology == "transformer" else 2
        if logits.ndim != expected_axes or num_classes not in (None, logits.shape[-1]):
            classes = "classes" if num_classes is None else num_classes
            layout = f"[batch, time, {classes}]" if expected_axes == 3 else f"[batch, {classes}]"
            raise ValueError(
                f"the head gives shape {list(logits.shape)}; a {self.topology} host needs {layout}: "
                "end it with a Linear layer that has one output per class"
            )
        self.joint_shapes = tuple(shapes)
        return self

    def _check_joint(self, index: int, x: Tensor) -> None:
        axes, channel_axis = TOPOLOGY_AXES[self.topology]
        layout = TOPOLOGY_LAYOUT[self.topology]
        if x.ndim != axes + self.spatial_dims:
            raise ValueError(
                f"segment {index} gives shape {list(x.shape)}; a {self.topology} host with spatial_dims "
                f"{self.spatial_dims} needs {axes + self.spatial_dims} axes, {layout}, at every joint: "
                "reshape inside the segment, or flatten in the head"
            )
        if x.shape[channel_axis] != self.widths[index]:
            raise ValueError(
                f"segment {index} gives shape {list(x.shape)}, which is {x.shape[channel_axis]} wide; the "
                f"host declares width {self.widths[index]} there: change the segment or the width"
            )


def _run(module: nn.Module, x: Tensor, name: str, source: str) -> Tensor:
    try:
        result = module(x)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{name} ({type(module).__name__}) does not take the shape {list(x.shape)} that comes from "
            f"{source} ({reason}): make its input fit that shape"
        ) from error
    if not isinstance(result, Tensor) or result.shape[:1] != x.shape[:1]:
        given = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"{name} ({type(module).__name__}) turns shape {list(x.shape)} into {given}; it must return one "
            f"tensor whose first axis is the batch of {x.shape[0]}"
        )
    return result


class GlobalMean(nn.Module):
    """The mean over space.  # [B, C, *spatial] → [B, C]"""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(-1)


CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d]] = {1: nn.Conv1d, 2: nn.Conv2d}


def cnn(
    input_shape: Sequence[int],
    num_classes: int,
    width: int = 8,
    depth: int = 3,
    kernel: int = 3,
    first_stride: int = 1,
    stride: int = 2,
) -> Host:
    """A small convolutional network over signals [C, L] or images [C, H, W].

    Each segment is convolution, one-group GroupNorm, ReLU; the first divides the resolution by
    `first_stride`, every other by `stride`. The head takes the mean over space.
    """
    spatial_dims = len(input_shape) - 1
    if spatial_dims not in CONVOLUTIONS:
        raise ValueError(
            f"input_shape is {list(input_shape)}; a cnn host takes [channels, length] or [channels, height, "
            "width]"
        )
    convolution = CONVOLUTIONS[spatial_dims]
    channels = [input_shape[0]] + [width] * depth
    segments = [
        nn.Sequential(
            convolution(
                c_in, c_out, kernel, stride=stride if index else first_stride, padding=kernel // 2, bias=False
            ),
            nn.GroupNorm(1, c_out),
            nn.ReLU(),
        )
        for index, (c_in, c_out) in enumerate(pairwise(channels))
    ]
    head = nn.Sequential(GlobalMean(), nn.Linear(width, num_classes))
    return Host(segments, "cnn", head, width, spatial_dims)


def mlp(input_shape: Sequence[int], num_classes: int, width: int = 16, depth: int = 3) -> Host:
    """A stack of Linear layers over flattened inputs, with ReLU."""
    features = int(torch.Size(input_shape).numel())
    sizes = [features] + [width] * depth
    segments = [
        nn.Sequential(*([nn.Flatten()] if index == 0 else []), nn.Linear(d_in, d_out), nn.ReLU())
        for index, (d_in, d_out) in enumerate(pairwise(sizes))
    ]
    return Host(segments, "mlp", nn.Linear(width, num_classes), width)


class AttendToPast(nn.Module):
    """Every position takes from itself and those before it.  # [..., T, 3 · D] → [..., T, D]

    The last axis of the input holds the queries, the keys and the values of all heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, qkv: Tensor) -> Tensor:
        split = qkv.unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)  # [3, ..., T, heads, D / heads]
        query, key, value = split.transpose(-3, -2)  # each [..., heads, T, D / heads]
        scores = (query * query.shape[-1] ** -0.5) @ key.mT
        weights = torch.softmax(scores + causal_mask(qkv.shape[-2], qkv), dim=-1)
        mixed: Tensor = weights @ value  # [..., heads, T, D / heads]
        return mixed.transpose(-3, -2).flatten(-2)


class CausalAttention(nn.Module):
    """Several heads of attention to the past, without bias.  # [..., T, D] → [..., T, D]"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"width {width} does not divide into {heads} heads; choose a divisor of the width"
            )
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attend = AttendToPast(heads)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.attend(self.qkv(x)))
        return result


def causal_mask(time: int, like: Tensor) -> Tensor:
    """0 where a position may look, minus infinity at its future.  # [T, T]"""
    steps = torch.arange(time, device=like.device)
    future = steps[None, :] > steps[:, None]
    return torch.zeros(time, time, dtype=like.dtype, device=like.device).masked_fill(future, float("-inf"))


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each normalised first and added to its input."""

    def __init__(self, width: int, heads: int, expansion: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, expansion * width), nn.GELU(), nn.Linear(expansion * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class TokenEmbedding(nn.Module):
    """Tokens and their positions as vectors.  # [B, T] int64 → [B, T, D]"""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.1)
        nn.init.normal_(self.tokens.weight, std=0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return result


def gpt(
    input_shape: Sequence[int],
    num_classes: int,
    width: int = 16,
    depth: int = 3,
    heads: int = 4,
    expansion: int = 2,
) -> Host:
    """A small causal transformer over token indices [T]; it predicts the next token at every position.

    The vocabulary is `num_classes`; the first segment embeds tokens and positions and holds the first block.
    """
    if len(input_shape) != 1:
        raise ValueError(f"input_shape is {list(input_shape)}; a gpt host takes token indices [time]")
    blocks = [TransformerBlock(width, heads, expansion) for _ in range(depth)]
    embedding = TokenEmbedding(num_classes, input_shape[0], width)
    segments: list[nn.Module] = [nn.Sequential(embedding, blocks[0]), *blocks[1:]]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_classes))
    return Host(segments, "transformer", head, width)


HOST_PRESETS: dict[str, Callable[..., Host]] = {"cnn": cnn, "mlp": mlp, "gpt": gpt}


def build_host(name: str, input_shape: Sequence[int], num_classes: int, **options: int) -> Host:
    """A preset host, checked on a blank sample: `build_host("cnn", (1, 8, 8), 10, width=8, depth=3)`."""
    if name not in HOST_PRESETS:
        raise ValueError(f"host preset is {name!r}; allowed are {', '.join(HOST_PRESETS)}")
    preset = HOST_PRESETS[name]
    allowed = list(inspect.signature(preset).parameters)[2:]
    for option, value in options.items():
        if option not in allowed:
            raise ValueError(f"the {name} host has no option {option!r}; allowed are {', '.join(allowed)}")
        if value < 1:
            raise ValueError(f"{option} is {value} for the {name} host; it must be at least 1")
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; a host needs at least 2 classes")
    host = preset(input_shape, num_classes, **options)
    dtype = torch.long if host.topology == "transformer" else torch.float32
    return host.validate(torch.zeros(2, *input_shape, dtype=dtype), num_classes)
