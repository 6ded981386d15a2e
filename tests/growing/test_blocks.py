"""Which blocks are skipped, and what a growth may copy: models whose blocks only look like a chain."""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import esper
from esper.growing.blocks import drop_nested, find_blocks, keep_skippable
from esper.growing.progressive import Progressive
from esper.utils.errors import UserError

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Kind(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        for name, value in settings.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Net(nn.Module):
    """Blocks that a function runs."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], make: Any = layers, stem: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4) if stem else nn.Identity()
        self.blocks, self.others = (nn.ModuleList(make() for _ in range(6)) for _ in range(2))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.stem(x))


def in_parallel(net: Any, x: Tensor) -> Tensor:
    return torch.stack([block(x) for block in net.blocks]).sum(0)


def residual_outside(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = x + block(x)
    return x


def half_outside(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = 0.5 * x + block(0.9 * x)
    return x


def on_parts(net: Any, x: Tensor) -> Tensor:
    return torch.stack([block(x * k) for k, block in enumerate(net.blocks)]).sum(0)


NO_CHAINS = [in_parallel, residual_outside, half_outside, on_parts]


def chain(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x


def alternating(net: Any, x: Tensor) -> Tensor:
    for block, other in zip(net.blocks, net.others, strict=True):
        x = other(block(x))
    return x


def with_layers_between(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = nn.functional.dropout(block(x), 0.1, net.training) * 2
    return x


def in_place_between(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
        x += 1
    return x


def checkpointed(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def checkpointed_anew(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


CHAINS = {
    chain: 6,
    alternating: 12,
    with_layers_between: 6,
    in_place_between: 6,
    checkpointed: 6,
    checkpointed_anew: 6,
}


def kept(model: nn.Module, example: Any) -> int:
    return sum(map(len, drop_nested(keep_skippable(model, find_blocks(model), example))))


@pytest.mark.parametrize("stem", [False, True])
@pytest.mark.parametrize("run", NO_CHAINS)
def test_blocks_that_are_no_chain_are_left_alone(run: Any, stem: bool) -> None:
    """A copy in parallel would stay a copy for ever; a skipped branch would double the stream."""
    model = Net(run, stem=stem)
    assert kept(model, ROWS) == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match="Net has 0 blocks"):
        Progressive(model, optimizer, 10, example=ROWS)
    Progressive(model, optimizer, 10)
    with pytest.raises(UserError, match=r"blocks\.1 .* does not go on with what blocks\.0 returned"):
        model(ROWS)


@pytest.mark.parametrize("stem", [False, True])
@pytest.mark.parametrize("run", CHAINS)
def test_chains_are_skipped_whatever_stands_between(run: Any, stem: bool) -> None:
    model = Net(run, stem=stem)
    assert kept(model, ROWS) == CHAINS[run]
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("run", [chain, alternating, checkpointed])
def test_without_an_example_the_first_pass_shows_a_chain(run: Any) -> None:
    model = Net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Progressive(model, optimizer, 100)
    for _ in range(2):
        model(ROWS).sum().backward()
    trained = [block[0].weight.grad is not None for block in model.blocks]  # type: ignore[index, union-attr]
    assert trained == [True, False] * 3
    assert not grower.step()


def test_lists_within_lists_never_run_as_blocks() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for first, second in self.layers:  # type: ignore[misc]
                x = x + first(x)
                x = x + second(x).tanh()
            return x

    model = Pairs()
    with pytest.raises(UserError, match="Pairs has 0 blocks"):
        Progressive(model, torch.optim.AdamW(model.parameters()), 10)
    assert esper.estimate(model, tokens=1e3).blocks == 0


def one_expert(net: Any, x: Tensor) -> Tensor:
    net.turn = (getattr(net, "turn", -1) + 1) % len(net.blocks)
    return net.blocks[net.turn](x)  # type: ignore[no-any-return]


def test_experts_of_which_one_runs_in_a_step_never_become_copies() -> None:
    model = Net(one_expert, stem=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    grower = Progressive(model, optimizer, 20, grow_at=0.5)
    for _ in range(9):
        model(ROWS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        grower.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=r"blocks\.1 .* never went on with what blocks\.0 .*; give example="):
        grower.step()
    assert grower.whole, "for whoever goes on without growth"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(UserError, match="Net has 0 blocks"):
        Progressive(Net(one_expert), optimizer, 20, example=ROWS)


@pytest.mark.parametrize("kind", ["compiled", "in place"])
def test_chains_that_are_compiled_are_grown_without_an_example(kind: str) -> None:
    """Nobody sees there what blocks go on with; after too many graphs torch runs some hooks all the same."""
    torch._dynamo.reset()
    model = nn.Sequential(*[Kind() for _ in range(12)])
    for block in model if kind == "in place" else ():
        block.compile(backend="eager")
    runs = torch.compile(model, backend="eager") if kind == "compiled" else model
    grower = Progressive(model, optimizer := torch.optim.AdamW(model.parameters()), 4, grow_at=0.5)
    for _ in range(4):
        runs(ROWS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        grower.step()
    assert grower.whole


class Zero(nn.Module):
    """A residual block whose branch begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        nn.init.zeros_(self.inner[1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.inner[1].bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


def test_branches_that_begin_as_the_identity_are_no_chain() -> None:
    for run, refused in ((in_parallel, True), (chain, False), (checkpointed_anew, False)):
        model = Net(run, make=Zero, stem=True)
        grower = Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10, grow_at=0.5)
        if refused:
            with pytest.raises(UserError, match=r"blocks\.1 .* does not go on with what blocks\.0 returned"):
                model(ROWS)
        else:
            model(ROWS)
            grower.complete()


class Auxiliary(Kind):
    """Returns a loss beside its output, in training alone."""

    def forward(self, x: Tensor) -> Any:
        out = x + self.inner(x)
        return (out, out.mean()) if self.training else out


def collect(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)[0] if net.training else block(x)
    return x


@pytest.mark.parametrize(
    ("example", "words"), [(ROWS, "returns something else in training mode"), (None, "give example=")]
)
@pytest.mark.parametrize("evaluated", [False, True])
def test_blocks_that_return_more_in_training_are_named(example: Any, words: str, evaluated: bool) -> None:
    model = Net(collect, make=Auxiliary)
    Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10, example=example)
    if evaluated:
        model.eval()(ROWS)
    with pytest.raises(UserError, match=rf"blocks\.0 cannot be skipped, since it .*{words}"):
        model.train()(ROWS)


@pytest.mark.parametrize("example", [None, ROWS])
def test_no_hook_of_the_first_pass_stays_on_a_whole_model(example: Any) -> None:
    def begin() -> tuple[nn.Module, Progressive]:
        model = nn.Sequential(*[Kind() for _ in range(4)])
        return model, Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10, example=example)

    def hooks(model: nn.Module) -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    model, grower = begin()
    assert hooks(model) == 4
    resumed, again = begin()
    grower.complete()
    again.load_state_dict(grower.state_dict())
    assert (hooks(model), hooks(resumed)) == (0, 0)


@pytest.mark.parametrize("whole", [False, True])
def test_an_example_does_not_end_a_compilation_in_place(whole: bool) -> None:
    calls = []

    def backend(graph: Any, _: Any) -> Any:
        return lambda *inputs: calls.append(1) or graph(*inputs)

    torch._dynamo.reset()
    model = Net(chain)
    for module in [model] if whole else model.blocks:
        module.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Progressive(model, optimizer, 10, grow_at=0.5, example=ROWS)
    assert not calls
    counts = []
    for _ in range(6):
        calls.clear()
        model(ROWS).square().mean().backward()
        optimizer.step()
        grower.step()
        counts.append(len(calls))
    assert counts == ([1] * 6 if whole else [3] * 5 + [6])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_blocks_that_run_although_they_are_skipped_are_found(kind: Any) -> None:
    """A model that goes past the forward of its blocks trains all of them."""

    def inside(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            for layer in block:
                x = layer(x)
        return x

    model = Net(inside)
    optimizer = kind(model.parameters(), lr=0.1)
    grower = Progressive(model, optimizer, 10)
    model(ROWS).square().mean().backward()
    optimizer.step()
    with pytest.raises(UserError, match=r"blocks\.1 was trained although it is to be skipped"):
        grower.step()
    assert grower.active == grower.blocks


@pytest.mark.parametrize(
    ("settings", "lists"),
    [
        ([{"sliding": k % 2 == 0} for k in range(8)], [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ([{"attention": "full" if k % 3 == 2 else "local"} for k in range(6)], [(0, 1, 3, 4), (2, 5)]),
        ([{"shift": (0, 3)[k % 2]} for k in range(4)], [(0, 2), (1, 3)]),
        ([{"window": None if k % 2 else 4} for k in range(4)], [(0, 2), (1, 3)]),
        ([{"shift": k * 3} for k in range(2)], []),  # one of each kind
        ([{"index": k} for k in range(4)], [(0, 1, 2, 3)]),
        ([{"layer_idx": k + 5, "name": f"layer {k}", "_seen": k % 2} for k in range(4)], [(0, 1, 2, 3)]),
        ([{"drop_path": 0.1 * k} for k in range(4)], [(0, 1, 2, 3)]),
        ([{"first": k == 0} for k in range(5)], [(1, 2, 3, 4)]),
    ],
    ids=str,
)
def test_blocks_that_alternate_are_lists_of_their_own(settings: Any, lists: Any) -> None:
    model = nn.Sequential(*[Kind(**each) for each in settings])
    assert [tuple(map(int, each.names)) for each in find_blocks(model)] == lists


def test_half_of_a_model_that_alternates_has_both_kinds() -> None:
    model = nn.Sequential(*[Kind(sliding=k % 2 == 0) for k in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    grower = Progressive(model, optimizer, 2, grow_at=0.5, example=ROWS)
    running = [k for k, block in enumerate(model) if "forward" not in vars(block)]
    assert running == [0, 1, 4, 5]
    with torch.no_grad():
        for k, block in enumerate(model):
            block.inner[0].weight.fill_(k)  # type: ignore[index, union-attr, operator]
    grower.step()
    weights = [float(block.inner[0].weight[0, 0]) for block in model]  # type: ignore[index, union-attr]
    assert weights == [0, 1, 0, 1, 4, 5, 4, 5], "a copy has the kind of its source"


class Buffers(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("scale", torch.full((1,), float(place)))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.cache) < len(x):
            self.cache = torch.ones(len(x))
            self.seen = torch.ones(len(x))
            self.register_buffer("late", torch.ones(1))
        out: Tensor = x + self.inner(x) * self.scale + self.cache[: len(x), None]
        return out


@pytest.mark.parametrize("example", [None, ROWS])
def test_statistics_are_copied_and_not_what_a_block_is(example: Any) -> None:
    model = nn.Sequential(*[Buffers(k) for k in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    grower = Progressive(model, optimizer, 2, grow_at=0.5, example=example)
    state = grower.state_dict()["buffers"][0]
    names = ["running_mean", "running_var", "num_batches_tracked"]
    made = [] if example is None else ["late"]  # by the pass over the example
    assert state == ["seen", *made, *(f"inner.1.{name}" for name in names)]
    model(ROWS).square().mean().backward()
    optimizer.step()
    grower.step()
    assert [float(block.scale) for block in model] == [0.0, 1.0, 2.0, 3.0]
    for name in names:
        here, there = (getattr(model[k].inner[1], name) for k in (0, 1))  # type: ignore[index, union-attr]
        assert torch.equal(here, there)
    assert not torch.equal(model[1].inner[1].running_mean, torch.zeros(4))  # type: ignore[index, union-attr]
    assert len(model[1].seen) == len(ROWS)  # type: ignore[arg-type]
    model(ROWS)


def test_a_resumed_run_copies_the_buffers_that_the_first_one_would() -> None:
    """Before the growth statistics differ, and would look like what a block is."""

    def begin() -> tuple[nn.Module, Any, Progressive]:
        torch.manual_seed(0)
        model = nn.Sequential(*[Kind(norm=nn.BatchNorm1d(4)) for _ in range(4)])
        for block in model:
            block.inner.append(block.norm)  # type: ignore[operator, union-attr]
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, Progressive(model, optimizer, 6, grow_at=0.5)

    def step(model: nn.Module, optimizer: Any, grower: Progressive) -> None:
        model(ROWS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        grower.step()

    whole, part = begin(), begin()
    for _ in range(6):
        step(*whole)
    step(*part)
    weights = copy.deepcopy(part[0].state_dict())
    again = begin()[0]
    again.load_state_dict(weights)
    optimizer = torch.optim.AdamW(again.parameters())
    grower = Progressive(again, optimizer, 6, grow_at=0.5)
    optimizer.load_state_dict(copy.deepcopy(part[1].state_dict()))
    grower.load_state_dict(part[2].state_dict())
    for _ in range(5):
        step(again, optimizer, grower)
    expected = whole[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_copy_that_was_made_while_blocks_were_skipped_grows_too(compiled: bool) -> None:
    model = nn.Sequential(*[Kind() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    grower = Progressive(model, optimizer, 2, grow_at=0.5)
    runs = torch.compile(model, backend="eager") if compiled else model
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.0))
    twin = copy.deepcopy(average)
    assert torch.equal(average(ROWS), model(ROWS))
    for _ in range(2):
        runs(ROWS).square().mean().backward()
        optimizer.step()
        grower.step()
        average.update_parameters(model)
        twin.update_parameters(model)
    assert grower.whole
    assert torch.equal(average(ROWS), model(ROWS))
    assert torch.equal(twin(ROWS), model(ROWS))


def test_an_average_is_given_as_it_is_also_of_a_compiled_model() -> None:
    model = nn.Sequential(*[Kind() for _ in range(4)])
    for average in (AveragedModel(model), AveragedModel(torch.compile(model, backend="eager"))):  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        grower = Progressive(model, optimizer, 2, grow_at=0.5, also=average)
        grower.complete()
        assert torch.equal(average(ROWS), model(ROWS))


@pytest.mark.parametrize("example", [False, True])
def test_a_mask_of_padding_makes_nested_tensors(example: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 6).eval()
    rows, padding = torch.randn(4, 5, 8), torch.zeros(4, 5, dtype=torch.bool)
    padding[:, 4] = True
    given = {"src": rows, "src_key_padding_mask": padding}
    optimizer = torch.optim.AdamW(model.parameters())
    grower = Progressive(model, optimizer, 10, example=given if example else None)
    assert grower.active == 3
    with torch.no_grad():
        assert model(**given).isfinite().all()


def test_a_model_that_was_trained_is_not_thrown_away() -> None:
    def begin(model: nn.Module, **options: Any) -> Progressive:
        return Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, grow_at=0.5, **options)

    loaded = nn.Sequential(*[Kind() for _ in range(4)])
    loaded.name_or_path = "somewhere"  # type: ignore[assignment]
    with pytest.raises(
        UserError, match=r"Sequential was trained before \(pretrained=False says it was not\)"
    ):
        begin(loaded).step()
    with pytest.raises(UserError, match="was trained before"):
        begin(nn.Sequential(*[Kind() for _ in range(4)]), pretrained=True).step()
    model = nn.Sequential(*[Kind() for _ in range(4)])
    first = begin(model)
    assert first.step()
    with pytest.raises(UserError, match="was trained before"):
        begin(model).step()
    assert begin(model, pretrained=False).step()
    resumed = begin(model)
    resumed.load_state_dict(first.state_dict())
    assert not resumed.step()


class Around(nn.Module):
    """A user's own module around blocks of another one, and a part of it that has none."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.encoder = inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrap", [Around, nn.DataParallel])
@pytest.mark.parametrize("way", ["loaded", "grown"])
def test_a_trained_model_is_found_inside_of_another_module(wrap: Any, way: str) -> None:
    def begin(model: nn.Module, **options: Any) -> Progressive:
        return Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, grow_at=0.5, **options)

    inner = nn.Sequential(*[Kind() for _ in range(4)])
    if way == "loaded":
        inner.name_or_path = "somewhere"  # type: ignore[assignment]
    else:
        assert begin(Around(inner)).step()
    for model in (wrap(inner), inner):
        with pytest.raises(UserError, match=r"was trained before \(pretrained=False says it was not\)"):
            begin(model).step()
    assert begin(wrap(inner), pretrained=False).step()
    fresh = Around(nn.Sequential(*[Kind() for _ in range(4)]))
    fresh.encoder.name_or_path = "somewhere"  # type: ignore[assignment]
    assert begin(fresh).step(), "what was loaded has no blocks"


@pytest.mark.parametrize("wrap", [Around, lambda inner: inner])
def test_grow_trains_plainly_what_was_loaded_inside_of_another_module(wrap: Any) -> None:
    inner = nn.Sequential(*[Kind() for _ in range(4)], nn.Linear(4, 2))
    inner.name_or_path = "somewhere"  # type: ignore[assignment]
    data = (torch.randn(64, 4), torch.arange(64) % 2)
    grown = esper.grow(wrap(inner), data, epochs=1, progress=False)
    assert "was loaded from a checkpoint" in grown.remarks[0]


def test_grow_and_estimate_refuse_a_model_of_which_blocks_are_skipped() -> None:
    model = nn.Sequential(*[Kind() for _ in range(4)], nn.Linear(4, 2))
    grower = Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10)
    data = (torch.randn(64, 4), torch.arange(64) % 2)
    for same in (model, copy.deepcopy(model)):
        for call in (esper.estimate, lambda m, samples: esper.grow(m, data, epochs=1, progress=False)):
            with pytest.raises(UserError, match=r"1 of Sequential is skipped now; call grower\.complete\(\)"):
                call(same, samples=64)
    later = copy.deepcopy(model)
    grower.complete()
    for same in (model, later):
        esper.estimate(same, samples=64)
        esper.grow(same, data, epochs=1, progress=False)


def test_states_that_are_loaded_after_the_grower_was_made_are_seen() -> None:
    model = nn.Sequential(*[Kind() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(ROWS).square().mean().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    grower = Progressive(model, optimizer, 10)
    optimizer.load_state_dict(saved)
    with pytest.raises(UserError, match="1 was trained although it is to be skipped"):
        grower.step()


def test_the_history_of_lbfgs_is_refused() -> None:
    model = nn.Sequential(*[Kind() for _ in range(4)])
    with pytest.raises(UserError, match="LBFGS"):
        Progressive(model, torch.optim.LBFGS(model.parameters()), 10)


def test_a_size_beside_the_hidden_state_is_no_tensor_and_needed() -> None:
    class Sized(Kind):
        def forward(self, x: Tensor, size: Any = None) -> Any:
            return x + self.inner(x), (len(x),)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Sized() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            size: Any = (len(x),)
            for block in self.blocks:
                x, size = block(x, size)
                _ = size[0]
            return x

    model = Model()
    Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10)
    with pytest.raises(UserError, match="give example="):
        model(ROWS)
    assert kept(Model(), ROWS) == 0


# ---- trainers ----------------------------------------------------------------------------------------------


def lightning_module(lightning: Any) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[Kind() for _ in range(4)])

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 4}]

    return Module()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_an_average_of_lightning_follows_and_rare_schedulers_last(tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import WeightAveraging

    def average(ours: Tensor, model: Tensor, _: Tensor) -> Tensor:
        return torch.lerp(ours, model, 0.01)

    averaging, apart = WeightAveraging(avg_fn=average), []

    class Watch(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            blocks = averaging._average_model.module.net
            apart.append(not torch.equal(blocks[0].inner[0].weight, blocks[1].inner[0].weight))

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ROWS), batch_size=1)
    trainer = lightning.Trainer(
        max_epochs=1, callbacks=[averaging, esper.LightningProgressive(grow_at=0.5), Watch()],
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(lightning_module(lightning), data)
    assert apart[:3] == [True] * 3
    assert apart[3] is False, "the average has the copy too"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_transformers_trainer_saves_with_an_example_and_an_average(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoConfig(
        hidden_size=16, num_layers=8, num_heads=2, window_size=4, attention_types=[[["global", "local"], 4]],
        vocab_size=40, bos_token_id=1, eos_token_id=39,
    )  # fmt: skip
    model = transformers.GPTNeoForCausalLM(config)
    tokens = torch.randint(2, 38, (8, 12), generator=torch.Generator().manual_seed(0))
    average = AveragedModel(model)
    grower = esper.TransformersProgressive(example={"input_ids": tokens}, also=[average], grow_at=0.5)
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=4, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=0.01
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[grower]).train()
    assert grower.grower is not None
    assert [each.names[0] for each in grower.grower.lists] == ["transformer.h.0", "transformer.h.1"]
    saved = transformers.GPTNeoForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    with torch.no_grad():
        assert torch.equal(saved.eval()(tokens).logits, model.eval()(tokens).logits), (
            "local layers stay local"
        )


def test_labels_beside_each_other_are_no_text() -> None:
    labels = (torch.randn(320, 40, generator=torch.Generator().manual_seed(0)) > 0).long()
    inputs = torch.randn(320, 4, generator=torch.Generator().manual_seed(1))
    grown = esper.grow(
        nn.Sequential(*[Kind() for _ in range(4)], nn.Linear(4, 40)), (inputs, labels), (inputs, labels),
        epochs=10, batch_size=16, device="cpu", progress=False,
        loss=lambda out, y: nn.functional.binary_cross_entropy_with_logits(out, y.float()),
        metric=lambda out, y: ((out > 0) == y).float().mean(),
    )  # fmt: skip
    assert "samples for each parameter" in grown.remarks[0]
    assert grown.remarks[0].startswith("it trains plainly: ")


def test_threads_that_run_at_once_are_told_apart() -> None:
    """As the replicas of nn.DataParallel."""
    model = Net(chain)
    Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 100)
    barrier, errors = Barrier(2), []

    def turn(_: Any, args: Any, output: Any) -> None:
        barrier.wait(timeout=10)

    for block in model.blocks:
        block.register_forward_hook(turn)

    def run(rows: Tensor) -> None:
        try:
            model(rows)
        except UserError as error:
            errors.append(error)

    threads = [Thread(target=run, args=(ROWS * scale,)) for scale in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


class NormedWeights(nn.Module):
    """A residual block whose weight is computed from buffers beside the parameter."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(6), wrap(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        parametrizations.weight_norm,
        torch.nn.utils.spectral_norm,
        lambda layer: layer,
    ],
)
def test_a_copy_computes_what_its_source_computes(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Also where a weight is made of buffers that were drawn at random, or statistics began apart."""
    torch.manual_seed(0)
    model = nn.Sequential(*(NormedWeights(wrap) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(torch.randn(9, 6))  # statistics of blocks that will be skipped
    grower = Progressive(model, optimizer, 10, grow_at=0.5, order="stacked")
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(9, 6)).square().mean().backward()
        optimizer.step()
        grower.step()
    assert grower.whole
    model.eval()
    x = torch.randn(4, 6)
    for k in range(4):
        torch.testing.assert_close(model[k + 4](x), model[k](x))


class Mixing(nn.Module):
    """A block whose kind is the class of its part alone."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.out = mixer, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mixer(x))  # type: ignore[no-any-return]


def test_kinds_that_differ_by_the_class_of_a_part_are_lists_of_their_own() -> None:
    model = nn.Sequential(*(Mixing(nn.Tanh() if k % 2 else nn.ReLU()) for k in range(8)))
    assert [each.names for each in find_blocks(model)] == [("0", "2", "4", "6"), ("1", "3", "5", "7")]


class Dropping(nn.Module):
    """Layers that return tuples, of which some are left out in training, the first one in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.passes = nn.ModuleList(TupleBlock() for _ in range(8)), 0

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            if k != self.passes:
                x = layer(x)[0]
        self.passes += self.training
        return x


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + self.inner(x), None


def test_the_form_of_blocks_is_learned_from_the_first_that_runs() -> None:
    model = Dropping()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    grower = Progressive(model, optimizer, 10, grow_at=0.8)
    for _ in range(10):
        optimizer.zero_grad()
        output = model(torch.randn(5, 4))
        assert output.shape == (5, 4)
        output.square().mean().backward()
        optimizer.step()
        grower.step()
    assert grower.whole
