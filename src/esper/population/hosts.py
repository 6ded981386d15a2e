"""Hosts: ordinary networks, cut into segments, with a slot after each segment.

    host = Host(segments=[stem, body, tail], topology="cnn", head=classifier, width=8, spatial_dims=2)
    host.validate(images[:2])

Any `nn.Module` may be a segment as long as it is a pure function of its input and its parameters: members run
under `vmap`, so there is no in-place arithmetic and no branch on a tensor's value. GroupNorm and LayerNorm
keep samples apart; BatchNorm does not.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from esper.lifecycle.actions import GROWTH_BLUEPRINTS, Blueprint, selectable_blueprints
from esper.population.blocks import (
    STANDARDIZED,
    Block,
    attention_block,
    conv_block,
    group_norm_silu,
    mlp_block,
    norm_groups,
)


class Host(nn.Module):
    """Segments in a row, a slot after each, and a head after the last slot."""

    def __init__(
        self,
        segments: Sequence[nn.Module],
        topology: str,
        head: nn.Module,
        width: int | Sequence[int],
        spatial_dims: int = 0,
        repeats: Sequence[int] | None = None,
    ) -> None:
        """width: of the joint after each segment, or one for all

        repeats: how many blocks a clone in each slot repeats (the one ahead, the last two or none); 1 for all
        if it is not given. Two blocks must be in a row where it is 2.
        """
        super().__init__()
        self.segments = nn.ModuleList(segments)
        self.head = head
        self.topology = topology
        self.widths = (width,) * len(segments) if isinstance(width, int) else tuple(width)
        self.spatial_dims = spatial_dims
        self.repeats = tuple(repeats or (1,) * len(segments))
        self.slot_shapes: tuple[tuple[int, ...], ...] = ()  # of one sample at each joint; set by `validate`

    @property
    def num_slots(self) -> int:
        return len(self.segments)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def blueprints(self) -> frozenset[Blueprint]:
        """The blueprints that may be germinated in some slot of this host."""
        grows = any(block_of(segment) is not None for segment in self.segments)
        return selectable_blueprints(self.topology) | (GROWTH_BLUEPRINTS if grows else frozenset())

    def forward(self, x: Tensor) -> Tensor:
        for segment in self.segments:
            x = segment(x)
        return self.head(x)

    @torch.no_grad()
    def validate(self, sample: Tensor) -> Host:
        """Run a sample through and record the shape of every joint.  # sample [B, *input_shape]

        Raises ValueError where sizes do not fit each other.
        """
        x, shapes = sample, []
        for index, segment in enumerate(self.segments):
            try:
                x = segment(x)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                raise ValueError(
                    f"segment {index} of the host does not take the shape {list(x.shape)} ({reason}); an "
                    "even kernel changes sizes, so use an odd one"
                ) from error
            shapes.append(tuple(x.shape[1:]))
        self.slot_shapes = tuple(shapes)
        return self


class GlobalMean(nn.Module):
    """The mean over space.  # [B, C, *spatial] → [B, C]"""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(-1)


CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d]] = {1: nn.Conv1d, 2: nn.Conv2d}


def _convolution_for(input_shape: Sequence[int], preset: str) -> type[nn.Conv1d] | type[nn.Conv2d]:
    if len(input_shape) - 1 not in CONVOLUTIONS:
        raise ValueError(
            f"input_shape is {list(input_shape)}; a {preset} host takes [channels, length] or "
            "[channels, height, width]"
        )
    return CONVOLUTIONS[len(input_shape) - 1]


def _check_resolution(
    input_shape: Sequence[int], kernel: int, stages: int = 1, first_stride: int = 1
) -> None:
    """Raise ValueError for a kernel or a number of halvings that the input is too small for."""
    longest, shown = max(input_shape[1:]), " × ".join(map(str, input_shape[1:]))
    if kernel > longest:
        raise ValueError(f"kernel is {kernel}, and the input is {shown}; give at most {longest}")
    most = math.ceil(longest / first_stride).bit_length()  # 8 → 4 → 2 → 1 are four stages
    if stages > most:
        raise ValueError(f"stages is {stages}; an input of {shown} can be halved for at most {most} of them")


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

    Each segment is a convolution with standardized filters, a group norm and SiLU; the first divides the
    resolution by `first_stride`, every other by `stride`. The head takes the mean over space.
    """
    convolution = STANDARDIZED[_convolution_for(input_shape, "cnn")]
    _check_resolution(input_shape, kernel)
    channels = [input_shape[0]] + [width] * depth
    segments = [
        nn.Sequential(
            convolution(
                c_in, c_out, kernel, stride=stride if index else first_stride, padding=kernel // 2, bias=False
            ),
            nn.GroupNorm(norm_groups(c_out), c_out),
            nn.SiLU(),
        )
        for index, (c_in, c_out) in enumerate(pairwise(channels))
    ]
    head = nn.Sequential(GlobalMean(), nn.Linear(width, num_classes))
    return Host(segments, "cnn", head, width, len(input_shape) - 1)


def mlp(input_shape: Sequence[int], num_classes: int, width: int = 16, depth: int = 3) -> Host:
    """A stack of Linear layers over flattened inputs, with ReLU."""
    features = int(torch.Size(input_shape).numel())
    sizes = [features] + [width] * depth
    segments = [
        nn.Sequential(*([nn.Flatten()] if index == 0 else []), nn.Linear(d_in, d_out), nn.ReLU())
        for index, (d_in, d_out) in enumerate(pairwise(sizes))
    ]
    return Host(segments, "mlp", nn.Linear(width, num_classes), width)


# As in GPT-2, for tokens and positions. With 0.5 and 0.1 every fixed depth of a GPT 256 wide ended 0.02 to
# 0.04 higher in test loss (4.1 PFLOP): what blocks add was small beside the embedding.
EMBEDDING_STD = 0.02


class TokenEmbedding(nn.Module):
    """Map tokens and their positions to vectors.  # [B, T] int64 → [B, T, D]"""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        nn.init.normal_(self.tokens.weight, std=EMBEDDING_STD)
        nn.init.normal_(self.positions, std=EMBEDDING_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        # Any number of axes ahead of the batch: a population calls this with tensors that have one for rows.
        return self.tokens(tokens) + self.positions[..., None, : tokens.shape[-1], :]


class EntrySegment(nn.Sequential):
    """A segment of a module of its own (a stem, a downsampling) and its block."""


def block_of(segment: nn.Module) -> Block | None:
    """Return the residual block that a segment ends with, or None."""
    last = segment[-1] if isinstance(segment, EntrySegment) else segment
    return last if isinstance(last, Block) else None


def residual_scale(blocks: int) -> float:
    """Return the factor of what each of so many blocks adds at first: the sum of all stays near 1."""
    return float((2 * blocks) ** -0.5)


def resnet(
    input_shape: Sequence[int],
    num_classes: int,
    width: int = 8,
    hidden: int = 0,
    depth: int = 1,
    stages: int = 2,
    kernel: int = 3,
    first_stride: int = 1,
) -> Host:
    """A residual network over signals [C, L] or images [C, H, W]: a stem, then stages of `depth` blocks.

    Every stage after the first halves the resolution and doubles the width. `hidden` channels lie between the
    two convolutions of a block of the first stage (0: as many as its width), twice as many in the next.
    """
    convolution = _convolution_for(input_shape, "resnet")
    _check_resolution(input_shape, kernel, stages, first_stride)
    scale, segments, widths, channels = residual_scale(stages * depth), [], [], input_shape[0]
    for stage in range(stages):
        wide = width << stage
        entry: nn.Module
        if stage:
            down = STANDARDIZED[convolution](channels, wide, kernel, stride=2, padding=kernel // 2)
            entry = nn.Sequential(*group_norm_silu(channels), down)
        else:
            entry = convolution(channels, wide, kernel, stride=first_stride, padding=kernel // 2)
        blocks = [
            conv_block(convolution, wide, (hidden or width) << stage, kernel, scale) for _ in range(depth)
        ]
        segments += [EntrySegment(entry, blocks[0]), *blocks[1:]]
        widths += [wide] * depth
        channels = wide
    head = nn.Sequential(*group_norm_silu(channels), GlobalMean(), nn.Linear(channels, num_classes))
    return Host(segments, "cnn", head, widths, len(input_shape) - 1)


def resmlp(
    input_shape: Sequence[int], num_classes: int, width: int = 16, hidden: int = 32, depth: int = 1
) -> Host:
    """A residual perceptron over flattened inputs: a Linear layer, then `depth` blocks of `hidden` units."""
    features = int(torch.Size(input_shape).numel())
    blocks = [mlp_block(width, hidden, residual_scale(depth)) for _ in range(depth)]
    entry = nn.Sequential(nn.Flatten(), nn.Linear(features, width))
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_classes))
    return Host([EntrySegment(entry, blocks[0]), *blocks[1:]], "mlp", head, width)


def gpt(
    input_shape: Sequence[int],
    num_classes: int,
    width: int = 16,
    depth: int = 1,
    heads: int = 4,
    expansion: int = 4,
) -> Host:
    """A causal transformer over token indices [T]; it predicts the next token at every position.

    The vocabulary is `num_classes`. Attention and perceptron of a layer are two segments, each with a slot; a
    clone behind the perceptron repeats the layer.
    """
    if len(input_shape) != 1:
        raise ValueError(f"input_shape is {list(input_shape)}; a gpt host takes token indices [time]")
    scale = residual_scale(depth)
    layers = [
        (attention_block(width, heads, scale), mlp_block(width, expansion * width, scale))
        for _ in range(depth)
    ]
    first, *rest = (block for layer in layers for block in layer)
    embedding = TokenEmbedding(num_classes, input_shape[0], width)
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_classes))
    return Host([EntrySegment(embedding, first), *rest], "transformer", head, width, repeats=(0, 2) * depth)


HOST_PRESETS: dict[str, Callable[..., Host]] = {
    "cnn": cnn,
    "mlp": mlp,
    "resnet": resnet,
    "resmlp": resmlp,
    "gpt": gpt,
}


def build_host(name: str, input_shape: Sequence[int], num_classes: int, **options: int) -> Host:
    """Build a preset host, checked on a blank sample: `build_host("cnn", (1, 8, 8), 10, width=8, depth=3)`.

    Raises ValueError for a preset, option or shape that does not exist.
    """
    if name not in HOST_PRESETS:
        raise ValueError(f"host preset is {name!r}; allowed are {', '.join(HOST_PRESETS)}")
    preset = HOST_PRESETS[name]
    allowed = list(inspect.signature(preset).parameters)[2:]
    for option, value in options.items():
        if option not in allowed:
            raise ValueError(f"the {name} host has no option {option!r}; allowed are {', '.join(allowed)}")
        if value < 0 or (value == 0 and option != "hidden"):
            raise ValueError(f"{option} is {value} for the {name} host; it must be at least 1")
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; a host needs at least 2 classes")
    host = preset(input_shape, num_classes, **options)
    dtype = torch.long if host.topology == "transformer" else torch.float32
    return host.validate(torch.zeros(2, *input_shape, dtype=dtype))
