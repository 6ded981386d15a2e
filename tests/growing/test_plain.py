"""What comes out is the user's: no class of ours, equal outputs wherever it goes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.foundation.errors import UserError
from esper.growing.cutting import Cut, cut
from esper.growing.exporting import save_archive, save_onnx
from esper.growing.plain import assemble, plain_graft, plain_member
from esper.lifecycle.actions import Style, selectable_blueprints
from esper.lifecycle.slot_states import SlotRecord, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.blueprints import BlendGate, build_blueprint
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.extract import AddGraft, GateGraft, MultiplyGraft, extract
from esper.population.population import Population
from tests.growing import models
from tests.growing.models import classes_of

SHAPES = {"cnn": (5, 8, 6, 6), "mlp": (5, 8), "transformer": (5, 6, 8)}
KINDS = [
    (topology, blueprint) for topology in SHAPES for blueprint in sorted(selectable_blueprints(topology))
]


def stirred(module: nn.Module) -> nn.Module:
    """Random weights everywhere: at birth a seed says nothing."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module


@pytest.mark.parametrize(("topology", "blueprint"), KINDS, ids=lambda v: getattr(v, "name", v))
def test_every_graft_has_a_plain_form_with_the_same_output(topology: str, blueprint: int) -> None:
    torch.manual_seed(0)
    dims = 2 if topology == "cnn" else 0
    seed = stirred(build_blueprint(blueprint, topology, 8, dims))
    gate = stirred(BlendGate(8, topology))
    for graft in (AddGraft(seed, 0.7), MultiplyGraft(seed, 1.0), GateGraft(seed, 0.5, gate)):
        plain = plain_graft(graft, dims)
        assert not any(name.startswith("esper") for name in classes_of(plain))
        for batch in (5, 2):
            h = torch.randn(batch, *SHAPES[topology][1:])
            torch.testing.assert_close(plain(h), graft(h), rtol=1e-4, atol=1e-5)
    if topology == "transformer":
        longer = torch.randn(2, 9, 8)
        torch.testing.assert_close(plain(longer), graft(longer), rtol=1e-4, atol=1e-5)


def grown_member(
    make: Callable[[], nn.Module], sample: Tensor, targets: Tensor
) -> tuple[Cut, nn.Module, nn.Module]:
    """A member with a living seed in every slot, in plain form and as the population extracts it."""
    torch.manual_seed(0)
    pieces = cut(make(), sample)
    population = Population(
        lambda: pieces.host, PopulationConfig(batch_size=8, batches_per_epoch=2), torch.arange(2)
    )
    chosen = sorted(selectable_blueprints(pieces.host.topology))
    record = [
        SlotRecord(Stage.FOSSILIZED, int(chosen[k % len(chosen)]), style=int(Style(k % 4)), alpha=1.0)
        for k in range(population.num_slots)
    ]
    states = SlotStates.from_records([record, record])
    population.germinate(torch.ones(2, population.num_slots, dtype=torch.bool), states.blueprint)
    population.seeds.weights.add_(0.1 * torch.randn_like(population.seeds.weights))
    data = MemberData.shared(sample, targets, 2)
    population.train_epoch(states, data, Clock(0, 0, 1))
    return pieces, plain_member(pieces, population, states, 1), extract(population, states, 1)


MODELS = [
    (models.small_cnn, models.images(16)),
    (models.Residual, models.images(16)),
    (models.small_mlp, models.table(16)),
    (models.LanguageModel, models.text(16)),
]


@pytest.mark.parametrize(("make", "data"), MODELS)
def test_the_plain_model_is_the_member_and_holds_no_class_of_ours(
    make: Callable[[], nn.Module], data: tuple[Tensor, Tensor]
) -> None:
    _, plain, extracted = grown_member(make, *data)
    torch.testing.assert_close(plain(data[0]), extracted(data[0]), rtol=1e-4, atol=1e-5)
    assert not any(name.startswith("esper") for name in classes_of(plain))


@pytest.mark.parametrize(
    ("make", "data"), MODELS[:3]
)  # fx cannot unpickle a forward that makes tensors by size
def test_state_dict_and_pickle_round_trip(
    make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    _, plain, _ = grown_member(make, *data)
    torch.save(plain, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(again(data[0]), plain(data[0]), rtol=0, atol=0)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(plain.state_dict())
    torch.testing.assert_close(again(data[0]), plain(data[0]), rtol=0, atol=0)


READER = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("esper", "tests"):
            raise ImportError("esper is not installed here")
sys.meta_path.insert(0, Wall())
import torch
archive, inputs, outputs = sys.argv[1:]
model = torch.export.load(archive).module()
given, wanted = torch.load(inputs), torch.load(outputs)
torch.testing.assert_close(model(given), wanted, rtol=1e-5, atol=1e-6)
assert "esper" not in sys.modules
print("equal")
"""


def test_an_archive_is_read_where_esper_is_not_installed(tmp_path: Path) -> None:
    x, y = models.images(16)
    _, plain, _ = grown_member(models.small_cnn, x, y)
    archive = save_archive(plain, x[:4], tmp_path / "grown.pt2")
    torch.save(x[:7], tmp_path / "in.pt")  # another batch size than the sample's
    torch.save(plain(x[:7]).detach(), tmp_path / "out.pt")
    arguments = [str(archive), str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READER, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.stdout.strip() == "equal", run.stderr


@pytest.mark.parametrize(("make", "data"), MODELS[1::2])  # archives of the others are read elsewhere
def test_torch_export_gives_equal_outputs(make: Callable[[], nn.Module], data: tuple[Tensor, Tensor]) -> None:
    _, plain, _ = grown_member(make, *data)
    batch = {0: torch.export.Dim("batch", min=1)}
    program = torch.export.export(plain, (data[0][:4],), dynamic_shapes=(batch,))
    torch.testing.assert_close(program.module()(data[0][:7]), plain(data[0][:7]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("make", "data"), [MODELS[0], pytest.param(*MODELS[3], marks=pytest.mark.long)])
def test_onnx_gives_equal_outputs(
    make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    _, plain, _ = grown_member(make, *data)
    session = runtime.InferenceSession(save_onnx(plain, data[0][:4], tmp_path / "grown.onnx"))
    (result,) = session.run(None, {session.get_inputs()[0].name: data[0][:7].numpy()})
    torch.testing.assert_close(torch.from_numpy(result), plain(data[0][:7]).detach(), rtol=1e-4, atol=1e-5)


def test_state_dict_round_trip_of_a_traced_language_model() -> None:
    x, y = models.text(16)
    _, plain, _ = grown_member(models.LanguageModel, x, y)
    _, other, _ = grown_member(models.LanguageModel, x.flip(0), y.flip(0))
    assert not torch.equal(other(x), plain(x))
    other.load_state_dict(plain.state_dict())
    torch.testing.assert_close(other(x), plain(x), rtol=0, atol=0)


def test_a_model_in_which_nothing_grew_is_the_users_own() -> None:
    model = models.small_mlp().eval()
    pieces = cut(model, models.table(6)[0])
    same = assemble(pieces, {}, {})
    assert type(same) is nn.Sequential
    torch.testing.assert_close(same(models.table(6)[0]), model(models.table(6)[0]), rtol=0, atol=0)


def test_one_sample_is_not_enough_to_leave_the_batch_free() -> None:
    with pytest.raises(UserError, match="at least 2 inputs"):
        save_archive(models.small_mlp(), models.table(6)[0][:1], "nowhere.pt2")
