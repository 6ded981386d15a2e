"""The GPU kernels against the same arithmetic in float64 or in plain operations."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from esper.lifecycle.actions import Blend, Blueprint, Style, selectable_blueprints
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.blocks import (
    ScaledConv1d,
    ScaledConv2d,
    StandardizedConv1d,
    StandardizedConv2d,
    attention_block,
    conv_block,
    group_norm_silu,
    mlp_block,
    scale_output,
    standardize,
)
from esper.population.blueprints import build_blueprint
from esper.population.config import PopulationConfig
from esper.population.data import Clock
from esper.population.hosts import Host, TokenEmbedding, build_host
from esper.population.optimizer import RowWeights, clip_rows, learn_rows, step_rows
from esper.population.population import Population
from esper.population.row_module import ParameterLayout, RowModule
from tests.population.worlds import every_pair, fading, record, seeds_of
from tests.slots import shared_data, states_from_records

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
    "wider than a tile": nn.Conv2d(64, 200, 3, padding=1),
    "wide and strided": nn.Conv2d(192, 144, 3, stride=2, padding=1, bias=False),
    "standardized": StandardizedConv2d(8, 12, 3, stride=2, padding=1),
    "standardized signal": StandardizedConv1d(8, 12, 5, padding=2),
    "standardized 1x1": StandardizedConv2d(65, 48, 1, bias=False),
    "standardized, odd widths": StandardizedConv2d(3, 10, 3, padding=1),
    "standardized depthwise": StandardizedConv2d(8, 8, 3, padding=1, groups=8),
    "scaled": scale_output(ScaledConv2d(48, 65, 3, stride=2, padding=1, bias=False), 0.3),
    "scaled signal": scale_output(ScaledConv1d(10, 3, 3, padding=1), 0.3),
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
    layout = ParameterLayout.of(module)
    weights = torch.randn(5, layout.total, device=device)
    x = torch.randn(5, 3, channels, *spatial, device=device)
    results = []
    for way, kind in (("fused", dtype), ("grouped", torch.float64)):
        w, inputs = (t.detach().to(dtype).to(kind).requires_grad_() for t in (weights, x))
        out = RowModule(module, device, way)(w, inputs)
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


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("channels", "spatial"), SIZES)
def test_fused_norm_is_the_norm_with_the_activations_around_it(
    channels: int, spatial: tuple[int, ...], groups: int
) -> None:
    norm = nn.GroupNorm(groups, channels)
    for module in (norm, nn.Sequential(norm, nn.SiLU()), nn.Sequential(nn.SiLU(), norm, nn.SiLU())):
        assert worst_error(module, channels, spatial) < 1e-5
    assert worst_error(nn.Sequential(nn.SiLU(), norm), channels, spatial, torch.bfloat16) < 2e-2


@pytest.mark.parametrize("width", [8, 6, 48])
def test_fused_layer_norm_is_the_layer_norm(width: int) -> None:
    for norm in (nn.LayerNorm(width), nn.LayerNorm(width, bias=False)):
        assert worst_error(norm, 5, (33, width)) < 1e-5
        assert worst_error(norm, 5, (33, width), torch.bfloat16) < 2e-2
    plain = nn.LayerNorm(width, elementwise_affine=False)  # its input alone has a gradient
    assert worst_error(nn.Sequential(plain, nn.Linear(width, 3)), 5, (33, width)) < 1e-5


@pytest.mark.parametrize(("inputs", "hidden"), [(6, 10), (8, 64), (16, 300)])
@pytest.mark.parametrize("vectors", [1, 33, 700])
def test_fused_gelu_is_a_bias_and_the_gelu(inputs: int, hidden: int, vectors: int) -> None:
    layers = nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, 3, bias=False))
    assert worst_error(layers, vectors, (inputs,)) < 1e-5
    assert worst_error(layers, vectors, (inputs,), torch.bfloat16) < 2e-2
    approximate = nn.Sequential(nn.Linear(inputs, hidden), nn.GELU("tanh"))  # keeps torch's own
    assert worst_error(approximate, vectors, (inputs,)) < 1e-5


@pytest.mark.parametrize(
    ("time", "width", "heads"), [(32, 8, 2), (5, 6, 3), (17, 64, 4), (64, 64, 1), (80, 8, 2)]
)
def test_fused_attention_is_the_attention(time: int, width: int, heads: int) -> None:
    branch = attention_block(width, heads).branch
    assert worst_error(branch, time, (width,)) < 1e-4
    if width < 64:  # random weights make the scores of wide heads too large for bfloat16
        plain = nn.Sequential(branch.first, branch.middle, branch.second)
        assert worst_error(plain, time, (width,), torch.bfloat16) < 3e-2


@pytest.mark.parametrize(
    ("name", "topology", "shape"),
    [
        *((b, "transformer", (32, 8)) for b in sorted(selectable_blueprints("transformer"))),
        *((b, "cnn", (8, 8, 8)) for b in sorted(selectable_blueprints("cnn"))),
        *((b, "cnn", (8, 20)) for b in sorted(selectable_blueprints("cnn"))),
    ],
)
def test_every_fused_blueprint_is_the_blueprint(
    name: Blueprint, topology: str, shape: tuple[int, ...]
) -> None:
    seed = build_blueprint(name, topology, 8, len(shape) - 1 if topology == "cnn" else 0)
    if not ParameterLayout.of(seed).total:
        pytest.skip("a blueprint without parameters has no gradients to compare")
    assert worst_error(seed, shape[0], shape[1:]) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_one_pass_over_rows_is_clipping_and_a_step(optimizer: str, dtype: torch.dtype) -> None:
    """To 1e-6 of the weights; rows that do not learn keep every bit, and no row meets another's NaN."""
    # Nearer to 1, the first corrections 1 - beta^n of both lose more digits than the two may differ by.
    config = PopulationConfig(optimizer=optimizer, clip_norm=0.5, second_beta=0.99)  # type: ignore[arg-type]
    device = torch.device("cuda")
    plain, fused = (RowWeights.zeros(6, 3000, device) for _ in range(2))
    gaps = torch.tensor(
        [[0, 3000], [3000, 3000], [7, 2047], [5, 2500], [1024, 2048], [2990, 3000]], device=device
    )
    columns = torch.arange(3000, device=device)
    used = (columns < gaps[:, :1]) | (columns >= gaps[:, 1:])
    start = torch.randn(6, 3000, device=device) * used
    plain.weights.copy_(start)
    fused.weights.copy_(start)
    half = start.bfloat16()
    active = torch.tensor([True, True, False, True, False, True], device=device)
    for step in range(5):
        gradient = torch.randn(6, 3000, device=device) * torch.tensor(
            [[1e-4], [1.0], [1.0], [0.0], [1.0], [3.0]], device=device
        )
        gradient = (gradient * used).to(dtype)
        gradient[4 if step < 4 else 5, 7] = float("nan")
        rate = 0.01 * torch.arange(step + 1, step + 7, device=device)  # of each row
        norms = gradient.float().norm(dim=1) * (1 + step)  # of each row, and of more than the row
        step_rows(plain, clip_rows(gradient, norms, config.clip_norm), rate, active, config)
        learn_rows(fused, gradient, norms, rate, active, config, gaps, half)
    for name, value in plain.tensors().items():
        torch.testing.assert_close(fused.tensors()[name], value, atol=1e-6, rtol=1e-5, equal_nan=True)
    assert torch.equal(fused.weights[~active], start[~active])
    assert torch.equal(half[:4], fused.weights[:4].bfloat16())  # the others hold NaN
    assert fused.weights[:5].isfinite().all()


# preset, shape of an input, the world whose blueprints it takes, options
HOSTS: dict[str, tuple[str, tuple[int, ...], str, dict[str, int]]] = {
    "images": ("cnn", (1, 8, 8), "images", {"width": 8}),
    "residual images": ("resnet", (1, 8, 8), "residual images", {"width": 8, "depth": 2, "stages": 2}),
    "residual vectors": ("resmlp", (6,), "residual vectors", {"width": 8, "hidden": 12, "depth": 3}),
    "text": ("gpt", (16,), "text", {"width": 8, "depth": 2, "heads": 2, "expansion": 2}),
}


def crowd(population: Population, pairs: list[tuple[int, Style]]) -> SlotStates:
    """Every pair in isolation or heard in the first slot; behind it others that are heard or fade out."""
    fits, records = population.growable(), []
    for i in range(len(pairs)):
        row = []
        for s in range(population.num_slots):
            name, style = pairs[(i + 5 * s + s * s) % len(pairs)]
            name = name if fits[i, s, name] else int(Blueprint.NORM)
            stage = Stage.TRAINING if s == 0 and i % 3 == 0 else Stage.HOLDING
            row.append(fading(name, style) if s == 2 else record(stage, name, style))
        records.append(row)
    return states_from_records(records).to(population.device)


def plant(population: Population, pairs: list[tuple[int, Style]]) -> SlotStates:
    states = crowd(population, pairs)
    population.germinate(states.blueprint >= 0, states.blueprint)
    population.read_slots(states)
    noise = torch.randn(seeds_of(population).weights.shape, generator=torch.Generator().manual_seed(17))
    seeds_of(population).weights.add_(0.2 * noise.to(population.device))
    return states


class Grown(NamedTuple):
    hosts: RowWeights
    parts: RowWeights
    loss: torch.Tensor  # [N]


def loud_host(preset: str, shape: tuple[int, ...], **options: int) -> Host:
    made = build_host(preset, shape, 10, **options)
    # Behind embeddings of std 0.02 noise as of TF32 grows to 6e-3 in 24 steps, of std 0.5 to 4e-6.
    for module in made.modules():
        if isinstance(module, TokenEmbedding):
            module.tokens.weight.data.mul_(25.0)
            module.positions.data.mul_(25.0)
    return made


def grown(host: str, device: str, precision: str, batches: int) -> Grown:
    """Two epochs, every seed folded in where it does not fade out, new seeds, two more epochs."""
    preset, shape, world, options = HOSTS[host]
    pairs, classes = every_pair(world), 10
    config = PopulationConfig(
        batch_size=8,
        batches_per_epoch=batches,
        precision=precision,  # type: ignore[arg-type]
        optimizer="sgd",
        initial_weights=4,
        seed_weights=1,
        host_lr=1e-2,
        folds=1,
    )

    population = Population(
        lambda: loud_host(preset, shape, **options), config, torch.arange(len(pairs)), device=device
    )
    population._graphs.possible &= batches > 1
    dice = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, *shape, generator=dice)
    targets = torch.randint(0, classes, (64, *shape) if preset == "gpt" else (64,), generator=dice)
    tokens = torch.randint(0, classes, (64, *shape), generator=dice)
    data = shared_data(tokens if preset == "gpt" else inputs, targets, len(pairs)).to(device)
    for course in range(2):
        states = plant(population, pairs)
        for epoch in range(2):
            population.train_epoch(states, data, Clock(0, 2 * course + epoch, 4))
        if course == 0:
            held = (states.blueprint >= 0) & (states.alpha_mode == AlphaMode.HOLD)
            population.prune((states.blueprint >= 0) & ~held)
            population.fold(held, states.style)
            population.read_slots(SlotStates.empty(len(pairs), population.num_slots).to(population.device))
    measured = population.validate(states, data)
    return Grown(population.hosts, population.parts, measured.loss)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 3e-3), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("batches", [1, 6])
@pytest.mark.parametrize("host", HOSTS)
def test_epochs_of_fused_rows_are_epochs_of_plain_rows(
    host: str, precision: str, tolerance: float, batches: int
) -> None:
    """Every blueprint and style, shadows, clones, widenings, folds, eager and replayed, against the CPU."""
    plain, fused = grown(host, "cpu", "float32", batches), grown(host, "cuda", precision, batches)
    assert relative_error(fused.hosts.weights.cpu(), plain.hosts.weights.double()) < tolerance
    assert relative_error(fused.loss.cpu(), plain.loss.double()) < tolerance
    used = plain.parts.first != 0  # the rest of a row is noise
    assert relative_error(fused.parts.weights.cpu()[used], plain.parts.weights[used].double()) < tolerance
    assert torch.equal(fused.parts.steps.cpu(), plain.parts.steps)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 3e-3), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("preset", ["gpt", "resmlp"])
def test_large_groups_that_learn_by_themselves_learn_what_plain_rows_learn(
    preset: str, precision: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.population.plan.graphs.LARGE_GROUP", 1)
    monkeypatch.setattr("esper.population.plan.graphs.LONG_ROWS", 1)
    shape, options = ((16,), {"heads": 2, "expansion": 2}) if preset == "gpt" else ((6,), {"hidden": 16})
    dice = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, *shape, generator=dice)
    targets = torch.randint(0, 10, (64, *shape) if preset == "gpt" else (64,), generator=dice)
    tokens = torch.randint(0, 10, (64, *shape), generator=dice)
    trained = []
    for device, kind in (("cpu", "float32"), ("cuda", precision)):
        config = PopulationConfig(batch_size=8, batches_per_epoch=6, precision=kind, optimizer="sgd")  # type: ignore[arg-type]
        population = Population(
            lambda: loud_host(preset, shape, width=8, depth=2, **options),
            config,
            torch.arange(5),
            device=device,
        )
        data = shared_data(tokens if preset == "gpt" else inputs, targets, 5).to(device)
        states = SlotStates.empty(5, population.num_slots).to(population.device)
        for epoch in range(3):
            population.train_epoch(states, data, Clock(0, epoch, 3))
        trained.append(population)
    plain, fused = trained
    assert fused._graphs._graphs[-1].run.by_group
    assert relative_error(fused.hosts.weights.cpu(), plain.hosts.weights.double()) < tolerance
    used = plain.parts.first != 0  # the rest of a row is noise
    assert relative_error(fused.parts.weights.cpu()[used], plain.parts.weights[used].double()) < tolerance


BRANCHES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "perceptron": (mlp_block(48, 20).branch, (3, 33, 48)),
    "perceptron of vectors": (mlp_block(6, 10).branch, (5, 6)),
    "attention": (attention_block(8, 2).branch, (3, 32, 8)),
    "convolutions": (conv_block(nn.Conv2d, 8, 12, 3).branch, (3, 8, 9, 7)),
    "signals in one group": (conv_block(nn.Conv1d, 6, 5, 3).branch, (3, 6, 21)),
    "images beyond a tile": (nn.Sequential(group_norm_silu(8), nn.Conv2d(8, 8, 1)), (3, 8, 64, 48)),
    "norm with weights": (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), (3, 33, 8)),
    "no norm": (nn.Sequential(nn.Linear(8, 8), nn.GELU()), (3, 8)),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", BRANCHES)
def test_an_added_branch_has_the_gradients_of_both_ways(name: str, dtype: torch.dtype) -> None:
    """Against x + branch(x) in float64, and replayed as a CUDA graph."""
    branch, shape = BRANCHES[name]
    device = torch.device("cuda")
    fused, plain = (RowModule(branch, device, way) for way in ("fused", "grouped"))
    weights = (0.2 * torch.randn(5, fused.layout.total, device=device)).to(dtype)
    x, probe = (torch.randn(5, *shape, device=device).to(dtype) for _ in range(2))
    if len(shape) > 3 or "signals" in name:
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)  # channels last in memory
    w, inputs = (t.double().requires_grad_() for t in (weights, x))
    out = inputs + plain(w, inputs)
    truth = [out, *torch.autograd.grad(out, (w, inputs), probe.double())]
    w, inputs = (t.clone().requires_grad_() for t in (weights, x))

    def step() -> list[torch.Tensor]:
        out = fused.add_to(w, inputs)
        return [out, *torch.autograd.grad(out, (w, inputs), probe)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which writes what the steps read
    with torch.cuda.stream(side):
        eager = step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = step()
    graph.replay()
    torch.cuda.synchronize()
    limit = 2e-2 if dtype is torch.bfloat16 else 2e-3
    for found in (eager, replayed):
        assert max(relative_error(a, b) for a, b in zip(found, truth, strict=True)) < limit
    with torch.no_grad():
        torch.testing.assert_close(fused.add_to(w, inputs), eager[0])


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("channels", "spatial"), SIZES)
def test_norm_without_weights_hands_its_input_on(
    channels: int, spatial: tuple[int, ...], dtype: torch.dtype, in_groups: bool
) -> None:
    """Either output may be without a gradient."""
    from esper.population import kernels

    groups = channels // 4 if in_groups else 1
    x, norm_grad, own_grad = (
        torch.randn(5, 3, channels, *spatial, device="cuda").to(dtype) for _ in range(3)
    )
    x.requires_grad_()
    truth = x.detach().double().requires_grad_()
    normed = torch.nn.functional.group_norm(truth.flatten(0, 1), groups).view_as(truth)
    same, out = kernels.RowNorm.apply(x, None, None, 1e-5, False, False, groups)  # type: ignore[no-untyped-call]
    assert torch.equal(same, x)
    for outputs, exact, grads in (
        ((same, out), (truth, normed), (own_grad, norm_grad)),
        ((out,), (normed,), (norm_grad,)),
        ((same,), (truth,), (own_grad,)),
    ):
        (found,) = torch.autograd.grad(outputs, x, grads, retain_graph=True)
        (wanted,) = torch.autograd.grad(exact, truth, [g.double() for g in grads], retain_graph=True)
        assert relative_error(found, wanted) < (1e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("standardized", "scale"), [(True, 1.0), (True, 0.3), (False, 1.0), (False, 0.3)])
@pytest.mark.parametrize(
    ("channels", "outputs", "kernel"),
    [
        (1, 16, (3, 3)),
        (3, 10, (3, 3)),
        (48, 65, (3, 3)),
        (65, 48, (1, 1)),
        (300, 17, (3, 3)),  # filters longer than a tile
        (10, 3, (5,)),
        (600, 3, (1,)),
    ],
)
def test_row_filters_are_the_filters_and_their_gradient(
    channels: int, outputs: int, kernel: tuple[int, ...], standardized: bool, scale: float, dtype: torch.dtype
) -> None:
    """Of weights within wider rows; with a gradient in either layout; the same bits again."""
    from esper.population import kernels

    shape = (3, outputs, channels, *kernel)
    size = prod(shape[1:])
    rows = (torch.randn(3, size + 37, device="cuda") + 0.5).to(dtype)
    probe = torch.randn(*shape[:3], prod(kernel), device="cuda").to(dtype).permute(0, 3, 2, 1)
    exact, leaf = rows.double().requires_grad_(), rows.clone().requires_grad_()
    weights, inner = (t[:, 13 : 13 + size].view(shape) for t in (exact, leaf))
    truth = scale * (standardize(weights, len(kernel)) if standardized else weights)
    truth = truth.flatten(3).permute(0, 3, 2, 1)  # [R, taps, C, O]
    taps, again = (kernels.RowFilters.apply(inner, standardized, scale) for _ in range(2))  # type: ignore[no-untyped-call]
    assert taps.is_contiguous()
    assert torch.equal(taps, again)
    (true_grad,) = torch.autograd.grad(truth, exact, probe.double())
    (grad,) = torch.autograd.grad(taps, leaf, probe)
    (same_grad,) = torch.autograd.grad(again, leaf, probe.contiguous())
    assert torch.equal(grad, same_grad)
    limit = 2e-6 if dtype is torch.float32 else 5e-3
    assert relative_error(taps, truth) < limit
    assert relative_error(grad, true_grad) < limit


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("inner", "pooled"),
    [
        ((5, 8, 8, 12), True),
        ((2, 64, 48, 6), True),
        ((3, 21, 16), True),
        ((3, 21, 16), False),
        ((33, 48), False),
    ],
)
def test_blended_outputs_are_those_of_every_blend(
    inner: tuple[int, ...], pooled: bool, gated: bool, dtype: torch.dtype
) -> None:
    """Rows with and without entries, forking rows, and all gradients, against float64."""
    from esper.population import kernels

    before, after, entries, channels = 4, 7, 5, inner[-1]
    base = torch.tensor([0, 1, 2, 3, 1, 3, 0], device="cuda")
    rows = torch.tensor([6, 0, 3, 4, 1], device="cuda")
    entry = torch.full((after,), -1, device="cuda").scatter(0, rows, torch.arange(entries, device="cuda"))
    kinds = [Blend.GATE if gated else Blend.ADD, Blend.MULTIPLY, Blend.ADD, Blend.MULTIPLY]
    blend = torch.tensor([int(kind) for kind in [*kinds, kinds[0]]], device="cuda")
    alpha = torch.linspace(0.2, 1.0, entries, device="cuda")
    work = SimpleNamespace(before=before, base=base, rows=rows, entry=entry, alpha=alpha, blend=blend)
    x, s, h = (torch.randn(n, *inner, device="cuda").to(dtype) for n in (before, entries, entries))
    gates = torch.randn(entries, channels + 1, device="cuda").to(dtype) if gated else None
    leaves = [tensor.requires_grad_() for tensor in (x, s, h, gates) if tensor is not None]
    out = kernels.RowBlend.apply(x, s, h, gates, work, pooled)  # type: ignore[no-untyped-call]

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    forks = (torch.arange(after, device="cuda") >= before).view(-1, *[1] * len(inner))
    continued = exact[0].index_select(0, base)
    truth = torch.where(forks, continued.detach(), continued)
    for e, row in enumerate(rows.tolist()):
        own_s, own_h = exact[1][e], exact[2][e]
        delta = own_s
        if blend[e] == Blend.GATE:
            mean = own_h.mean(dim=list(range(1, own_h.ndim - 1)), keepdim=True) if pooled else own_h
            weight, bias = exact[3][e, :channels], exact[3][e, channels]
            delta = torch.sigmoid((mean * weight).sum(-1, keepdim=True) + bias) * own_s
        elif blend[e] == Blend.MULTIPLY:
            delta = own_h * torch.tanh(own_s)
        hot = torch.zeros(after, dtype=torch.float64, device="cuda")
        hot[row] = alpha[e]
        truth = truth + hot.view(-1, *[1] * len(inner)) * delta
    probe = torch.randn_like(truth)
    found = [out, *torch.autograd.grad(out, leaves, probe.to(dtype))]
    wanted = [truth, *torch.autograd.grad(truth, exact, probe.to(dtype).double())]
    limit = 1e-2 if dtype is torch.bfloat16 else 1e-5
    assert max(relative_error(a, b) for a, b in zip(found, wanted, strict=True)) < limit
