"""Layers over rows against vmap, and what has no row form."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.parametrizations import weight_norm

from esper.lifecycle.actions import selectable_blueprints
from esper.population.blocks import attention_block, conv_block, mlp_block
from esper.population.blueprints import BlendGate, build_blueprint
from esper.population.hosts import GlobalMean, TokenEmbedding
from esper.population.row_module import ParameterLayout, RowModule, row_form

CPU = torch.device("cpu")
ROWS, BATCH = 3, 2

# name: (module, shape of a sample)
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(4, 6), (4,)),
    "linear over time": (nn.Linear(4, 6, bias=False), (5, 4)),
    "conv 3x3": (nn.Conv2d(4, 6, 3, padding=1), (4, 6, 5)),
    "conv strided": (nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), bias=False), (2, 7, 6)),
    "conv 1x1": (nn.Conv2d(4, 4, 1, bias=False), (4, 5, 5)),
    "conv depthwise": (nn.Conv2d(4, 4, 3, padding=1, groups=4), (4, 5, 5)),
    "conv in groups": (nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "conv same": (nn.Conv2d(4, 4, 3, padding="same"), (4, 5, 5)),
    "conv dilated": (nn.Conv1d(4, 4, 3, dilation=2), (4, 9)),
    "signal": (nn.Conv1d(3, 4, 5, stride=2, padding=2), (3, 11)),
    "signal depthwise": (nn.Conv1d(4, 4, 3, padding=1, groups=4, bias=False), (4, 9)),
    "one-group norm": (nn.GroupNorm(1, 4), (4, 5, 5)),
    "two-group norm": (nn.GroupNorm(2, 4), (4, 9)),
    "norm of vectors": (nn.GroupNorm(2, 4), (4,)),
    "plain group norm": (nn.GroupNorm(2, 4, affine=False), (4, 9)),
    "layer norm": (nn.LayerNorm(4), (5, 4)),
    "layer norm over two axes": (nn.LayerNorm((3, 4)), (2, 3, 4)),
    "layer norm without bias": (nn.LayerNorm(4, bias=False), (4,)),
    "plain layer norm": (nn.LayerNorm(4, elementwise_affine=False), (4,)),
    "mean": (GlobalMean(), (4, 5, 5)),
    "flatten": (nn.Flatten(), (2, 3, 4)),
    "activations": (nn.Sequential(nn.ReLU(), nn.GELU(), nn.LeakyReLU(0.2), nn.ELU(), nn.Tanh()), (4,)),
    "gate of images": (BlendGate(4, 2), (4, 5, 5)),
    "gate of text": (BlendGate(4, 0), (5, 4)),
    "branch of an attention": (attention_block(6, heads=2).branch, (5, 6)),
    "branch of a perceptron": (mlp_block(6, hidden=5).branch, (5, 6)),
    "branch of convolutions": (conv_block(nn.Conv2d, 4, 6, 3).branch, (4, 5, 5)),
}
JOINTS = {("cnn", 1): (4, 7), ("cnn", 2): (4, 5, 5), ("mlp", 0): (4,), ("transformer", 0): (5, 4)}


def under_vmap(module: nn.Module, rows: Tensor, x: Tensor) -> Tensor:
    def run(tensors: dict[str, Tensor], sample: Tensor) -> Tensor:
        result: Tensor = functional_call(module, tensors, (sample,))
        return result

    return vmap(run)(ParameterLayout.of(module).unflatten(rows), x)


def check_against_vmap(module: nn.Module, shape: tuple[int, ...]) -> RowModule:
    """Outputs and the gradients of weights and inputs, in float64 to 1e-11; the module stays as it was."""
    generator = torch.Generator().manual_seed(1)
    module = module.double()
    before = [(name, parameter, parameter.clone()) for name, parameter in module.named_parameters()]
    body = RowModule(module, CPU)
    weights = torch.randn(ROWS, body.layout.total, generator=generator, dtype=torch.float64)
    x = torch.randn(ROWS, BATCH, *shape, generator=generator, dtype=torch.float64)
    results = []
    for run in (lambda w, h: body(w, h), functools.partial(under_vmap, module)):
        w, h = weights.clone().requires_grad_(), x.clone().requires_grad_()
        out = run(w, h)
        probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        found = torch.autograd.grad((out * probe).sum(), (w, h), allow_unused=True)
        results.append((out.detach(), *(g for g in found if g is not None)))
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(here, there, atol=1e-11, rtol=1e-9)
    assert all(module.get_parameter(name) is own and torch.equal(own, value) for name, own, value in before)
    assert len(list(module.parameters())) == len(before)
    return body


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_over_rows_equals_vmap(name: str) -> None:
    assert check_against_vmap(*LAYERS[name]).in_row_form


@pytest.mark.parametrize("place", JOINTS)
def test_a_blueprint_over_rows_equals_vmap(place: tuple[str, int]) -> None:
    topology, dims = place
    for name in sorted(selectable_blueprints(topology)):
        body = check_against_vmap(build_blueprint(name, topology, 4, dims), JOINTS[place])
        assert body.in_row_form


@pytest.mark.parametrize(
    ("module", "in_row_form"),
    [
        (TokenEmbedding(vocabulary=7, context=6, width=4), True),  # a shorter sequence than its context
        (nn.Sequential(TokenEmbedding(7, 5, 4), attention_block(4, heads=2).branch), True),
        (nn.Embedding(7, 4, padding_idx=0), False),
        (nn.Embedding(7, 4, max_norm=1.0), False),
    ],
)
def test_tokens_over_rows_equal_each_row_alone(module: nn.Module, in_row_form: bool) -> None:
    module = module.double()
    body = RowModule(module, CPU)
    assert body.in_row_form == in_row_form
    if not in_row_form:
        return
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(ROWS, body.layout.total, generator=generator, dtype=torch.float64).requires_grad_()
    tokens = torch.randint(0, 7, (ROWS, BATCH, 5), generator=generator)
    together = body(weights, tokens)
    assert ParameterLayout.of(module) == body.layout, "the weights of rows were lent to another module"
    tensors = body.layout.unflatten(weights)
    alone = [
        functional_call(module, {name: value[r] for name, value in tensors.items()}, (tokens[r],))
        for r in range(ROWS)
    ]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-11, rtol=1e-9)
    probe = torch.linspace(-1, 1, together.numel(), dtype=torch.float64).view_as(together)
    found = [
        torch.autograd.grad((out * probe).sum(), weights, retain_graph=True)[0]
        for out in (together, torch.stack(alone))
    ]
    torch.testing.assert_close(*found, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("token", [-1, 7])
def test_a_token_beyond_the_vocabulary_finds_no_other_rows_vectors(token: int) -> None:
    body = RowModule(nn.Embedding(7, 4), CPU)
    tokens = torch.zeros(ROWS, BATCH, 5, dtype=torch.long)
    tokens[1, 0, 2] = token
    with pytest.raises(IndexError):
        body(torch.randn(ROWS, 28), tokens)


class Doubled(nn.Linear):
    """Not what a Linear computes."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class Standardised(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, self.weight - self.weight.mean(), self.bias)


class Shifted(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + super().forward(x)
        return result


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, inputs, output: output * 3.0)
    return layer


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: Doubled(4, 4), (4,)),
        (lambda: Standardised(4, 4, 3), (4, 6)),
        (lambda: Shifted(1, 4), (4, 6)),
        (lambda: Residual(nn.Linear(4, 4)), (4,)),
        (lambda: nn.Flatten(2), (2, 3, 4)),
        (lambda: weight_norm(nn.Conv1d(4, 4, 3)), (4, 6)),
        (lambda: nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), (4, 6)),
        (hooked, (4,)),
    ],
)
def test_what_only_looks_like_a_known_layer_runs_as_it_is(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    assert not check_against_vmap(make(), shape).in_row_form
    assert row_form(nn.Sequential(nn.ReLU(), make()), "grouped") is None


def test_tied_weights_stay_tied() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    body = check_against_vmap(nn.Sequential(first, nn.Tanh(), second), (4,))
    assert body.layout.total == 16
    assert body.in_row_form


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Dropout(0.1)])
def test_what_behaves_differently_in_evaluation_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"1 is a {type(layer).__name__}, which behaves differently"):
        RowModule(nn.Sequential(nn.Linear(4, 4), layer), CPU)
    assert RowModule(nn.BatchNorm1d(4, track_running_stats=False), CPU).layout.total == 8


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.LayerNorm((5, 4)), Doubled(4, 4)])
def test_add_to_adds_the_output_to_the_input(layer: nn.Module) -> None:
    body = RowModule(nn.Sequential(layer, nn.Linear(4, 4)), CPU)
    weights, x = torch.randn(ROWS, body.layout.total), torch.randn(ROWS, BATCH, 5, 4)
    assert torch.equal(body.add_to(weights, x), x + body(weights, x))
