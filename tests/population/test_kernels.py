"""The GPU kernels against the same arithmetic in float64 or in plain operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.lifecycle.actions import Blueprint, Style, selectable_blueprints
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.blueprints import build_blueprint
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.hosts import CausalAttention, TransformerBlock, build_host
from esper.population.layout import Layout
from esper.population.optimiser import RowWeights, clip_rows, learn_rows, step_rows
from esper.population.population import Population
from esper.population.row_module import RowModule
from tests.population.worlds import every_pair, fading, record

pytestmark = pytest.mark.gpu

CONVOLUTIONS = {
    "3x3": nn.Conv2d(8, 12, 3, padding=1),
    "from one channel": nn.Conv2d(1, 16, 3, padding=1, bias=False),
    "1x1": nn.Conv2d(16, 8, 1, bias=False),
    "strided": nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
    "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
    "strided depthwise": nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False),
    "unpadded": nn.Conv2d(4, 8, 3, bias=False),
    "signal": nn.Conv1d(8, 8, 5, stride=2, padding=2),
    "depthwise signal": nn.Conv1d(8, 8, 3, padding=1, groups=8, bias=False),
    "wide": nn.Conv2d(32, 64, 3, padding=1, bias=False),
}
SIZES = [(8, (8, 8)), (12, (5, 3)), (16, (40,)), (32, (32, 32)), (8, (64, 48))]
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}  # products of float32 run in TF32


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def worst_error(
    module: nn.Module, channels: int, spatial: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> float:
    """Of outputs and both gradients: fused rows against float64 rows under the grouped form."""
    device = torch.device("cuda")
    layout = Layout.of(module)
    weights = torch.randn(5, layout.total, device=device)
    x = torch.randn(5, 3, channels, *spatial, device=device)
    results = []
    for way, kind in (("fused", dtype), ("grouped", torch.float64)):
        w, inputs = (t.detach().to(dtype).to(kind).requires_grad_() for t in (weights, x))
        out = RowModule(module, device, way)(w, inputs, {}, True)
        probe = torch.linspace(-1, 1, out.numel(), device=device).view_as(out)
        grads = torch.autograd.grad((out.double() * probe).sum(), (w, inputs))
        results.append((out.detach(), *grads))
    errors = [relative_error(fused, truth) for fused, truth in zip(*results, strict=True)]
    return float(torch.tensor(errors).max())  # a NaN stays a NaN, and passes no test


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_fused_convolution_is_the_convolution(name: str, dtype: torch.dtype) -> None:
    conv = CONVOLUTIONS[name]
    spatial = (9,) if isinstance(conv, nn.Conv1d) else (9, 7)
    assert worst_error(conv, conv.in_channels, spatial, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize(("channels", "spatial"), SIZES)
def test_fused_norm_is_the_norm_with_the_activations_around_it(
    channels: int, spatial: tuple[int, ...]
) -> None:
    norm = nn.GroupNorm(1, channels)
    for module in (norm, nn.Sequential(norm, nn.ReLU()), nn.Sequential(nn.SiLU(), norm, nn.ReLU())):
        assert worst_error(module, channels, spatial) < 1e-5
    assert worst_error(nn.Sequential(nn.SiLU(), norm), channels, spatial, torch.bfloat16) < 2e-2


@pytest.mark.parametrize("width", [8, 6, 48])
def test_fused_layer_norm_is_the_layer_norm(width: int) -> None:
    for norm in (nn.LayerNorm(width), nn.LayerNorm(width, bias=False)):
        assert worst_error(norm, 5, (33, width)) < 1e-5
        assert worst_error(norm, 5, (33, width), torch.bfloat16) < 2e-2
    plain = nn.LayerNorm(width, elementwise_affine=False)  # its input alone has a gradient
    assert worst_error(nn.Sequential(plain, nn.Linear(width, 3)), 5, (33, width)) < 1e-5


@pytest.mark.parametrize(
    ("time", "width", "heads"), [(32, 8, 2), (5, 6, 3), (17, 64, 4), (64, 64, 1), (80, 8, 2)]
)
def test_fused_attention_is_the_attention(time: int, width: int, heads: int) -> None:
    attention = CausalAttention(width, heads)
    assert worst_error(attention, time, (width,)) < 1e-4
    if width < 64:  # random weights make the scores of wide heads too large for bfloat16
        assert worst_error(attention, time, (width,), torch.bfloat16) < 3e-2
    assert worst_error(TransformerBlock(width, heads, 2), time, (width,)) < 1e-4


@pytest.mark.parametrize("name", [b.name for b in sorted(selectable_blueprints("transformer"))])
def test_every_fused_blueprint_of_text_is_the_blueprint(name: str) -> None:
    seed = build_blueprint(Blueprint[name], "transformer", 8, 0)
    if not Layout.of(seed).total:
        pytest.skip("a blueprint without parameters has no gradients to compare")
    assert worst_error(seed, 32, (8,)) < 5e-3


@pytest.mark.parametrize("spatial", [(8, 8), (20,)])
@pytest.mark.parametrize("name", [b.name for b in sorted(selectable_blueprints("cnn"))])
def test_every_fused_blueprint_is_the_blueprint(name: str, spatial: tuple[int, ...]) -> None:
    seed = build_blueprint(Blueprint[name], "cnn", 8, len(spatial))
    if not Layout.of(seed).total:
        pytest.skip("a blueprint without parameters has no gradients to compare")
    assert worst_error(seed, 8, spatial) < 5e-3


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_one_pass_over_rows_is_clipping_and_a_step(optimiser: str) -> None:
    """To 1e-6 of the weights; rows that do not learn keep every bit, and no row meets another's NaN."""
    config = PopulationConfig(optimiser=optimiser, clip_norm=0.5)  # type: ignore[arg-type]
    device = torch.device("cuda")
    plain, fused = (RowWeights.zeros(6, 3000, device) for _ in range(2))
    start = torch.randn(6, 3000, device=device)
    plain.weights.copy_(start)
    fused.weights.copy_(start)
    active = torch.tensor([True, True, False, True, False, True], device=device)
    for step in range(5):
        gradient = torch.randn(6, 3000, device=device) * torch.tensor(
            [[1e-4], [1.0], [1.0], [0.0], [1.0], [3.0]], device=device
        )
        gradient[4 if step < 4 else 5, 7] = float("nan")
        rate = torch.tensor(0.01 * (step + 1), device=device)
        clipped, norms = clip_rows(gradient, config.clip_norm)
        step_rows(plain, clipped, rate, active, config)
        torch.testing.assert_close(learn_rows(fused, gradient, rate, active, config), norms, equal_nan=True)
    for name, value in plain.tensors().items():
        torch.testing.assert_close(fused.tensors()[name], value, atol=1e-6, rtol=1e-5, equal_nan=True)
    assert torch.equal(fused.weights[~active], start[~active])
    assert fused.weights[:5].isfinite().all()


def crowd(population: Population, pairs: list[tuple[int, Style]]) -> SlotStates:
    """Every pair in isolation or heard in the first slot, another heard and a third fading behind it."""
    records = []
    for i, (blueprint, style) in enumerate(pairs):
        second, third = (pairs[(i + k) % len(pairs)] for k in (5, 11))
        first = record(Stage.TRAINING if i % 3 == 0 else Stage.HOLDING, blueprint, style)
        records.append([first, record(Stage.HOLDING, *second), fading(*third)])
    states = SlotStates.from_records(records).to(population.device)
    population.germinate(states.blueprint >= 0, states.blueprint)
    noise = torch.randn(population.seeds.weights.shape, generator=torch.Generator().manual_seed(17))
    population.seeds.weights.add_(0.2 * noise.to(population.device))
    return states


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 3e-3), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("batches", [1, 6])
def test_an_epoch_of_fused_rows_is_an_epoch_of_plain_rows(
    precision: str, tolerance: float, batches: int
) -> None:
    """Every blueprint and style, shadows and all, eager and replayed, against the CPU in float32."""
    pairs = every_pair("images")
    found = {}
    for device, kind in (("cpu", "float32"), ("cuda", precision)):
        config = PopulationConfig(
            batch_size=8,
            batches_per_epoch=batches,
            precision=kind,  # type: ignore[arg-type]
            optimiser="sgd",
            initial_weights=4,
            seed_weights=1,
            host_lr=1e-2,
        )
        population = Population(
            lambda: build_host("cnn", (1, 8, 8), 10, width=8), config, torch.arange(len(pairs)), device=device
        )
        states = crowd(population, pairs)
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(64, 1, 8, 8, generator=generator)
        targets = torch.randint(0, 10, (64,), generator=generator)
        data = MemberData.shared(inputs, targets, len(pairs)).to(device)
        for epoch in range(2):
            population.train_epoch(states, data, Clock(0, epoch, 4))
        measured = population.validate(states, data)
        found[device] = (population.hosts.weights, population.seeds.weights, measured.loss)
    for plain, fused in zip(found["cpu"], found["cuda"], strict=True):
        assert relative_error(fused.cpu(), plain.double()) < tolerance
