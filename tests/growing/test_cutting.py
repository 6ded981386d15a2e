"""Any model becomes a host whose output is the model's own, and what cannot be cut says why."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from esper.foundation.errors import UserError
from esper.growing.budget import SeedPrices
from esper.growing.cutting import cut
from esper.lifecycle.actions import Blueprint
from esper.population.config import PopulationConfig
from esper.population.population import Population
from tests.growing import models


@pytest.mark.parametrize(
    ("make", "sample", "topology", "names"),
    [
        (models.small_cnn, models.images(6)[0], "cnn", ("3", "7")),
        (models.small_mlp, models.table(6)[0], "mlp", ("1", "3")),
        (models.Residual, models.images(6)[0], "cnn", ("relu", "add", "relu_2")),
        (models.LanguageModel, models.text(6)[0], "transformer", ("add", "blocks.0", "blocks.1")),
    ],
)
def test_slots_are_found_and_the_host_gives_the_output_of_the_model(
    make: Callable[[], nn.Module], sample: Tensor, topology: str, names: tuple[str, ...]
) -> None:
    model = make().eval()
    before = copy.deepcopy(model.state_dict())
    pieces = cut(model, sample)
    assert pieces.slot_names == names
    assert pieces.host.topology == topology
    torch.testing.assert_close(pieces.host.eval()(sample), model(sample))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_every_tensor_of_the_model_is_in_exactly_one_piece() -> None:
    model = models.LanguageModel()
    pieces = cut(model, models.text(6)[0])
    names = [name for part in pieces.keys for name in part.values()]
    assert sorted(names) == sorted(model.state_dict())


def test_slots_by_name_in_the_order_of_the_forward_pass() -> None:
    pieces = cut(models.small_cnn(), models.images(6)[0], slots=[7, "2"])
    assert pieces.slot_names == ("2", "7")
    assert pieces.host.joint_shapes == ((4, 8, 8), (4, 4, 4))


def test_a_list_of_blocks_stands_for_each_block() -> None:
    pieces = cut(models.LanguageModel(depth=3), models.text(6)[0], slots=["blocks"])
    assert pieces.slot_names == ("blocks.0", "blocks.1", "blocks.2")
    assert pieces.host.widths == (8, 8, 8)


def test_many_blocks_get_a_few_slots_spread_over_all() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(20)], nn.Linear(5, 3))
    pieces = cut(model, models.table(6)[0])
    assert len(pieces.slot_names) == 8
    assert pieces.slot_names[-1] == "19.1"


def test_frozen_parameters_are_not_trained() -> None:
    model = models.small_mlp()
    model[0].requires_grad_(False)
    pieces = cut(model, models.table(6)[0])
    assert pieces.host.num_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sorted(n for part in pieces.keys for n in part.values()) == sorted(model.state_dict())


def test_signals_and_sequences_are_told_apart() -> None:
    signals = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    assert cut(signals, torch.randn(4, 1, 8)).host.topology == "cnn"
    sequences = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 7))
    assert cut(sequences, torch.randint(0, 7, (4, 5))).host.topology == "transformer"


@pytest.mark.parametrize(
    ("model", "sample", "slots", "sentence"),
    [
        (models.Branching(), models.table(6)[0], None, "forward cannot be traced.*nn.Sequential"),
        (models.FunctionalDropout(), models.table(6)[0], None, "use the layer"),
        (models.Tied(), models.text(6)[0], None, "tied or reused.*weights of its own"),
        (nn.Linear(5, 3), models.table(6)[0], None, "no place for a slot"),
        (models.small_mlp(), models.table(6)[0], ["9"], "no module that Sequential calls; it calls 0, 1"),
        (models.small_mlp(), models.table(6)[0], ["4"], "its last layer; name a layer before it"),
        (models.small_mlp(), models.table(6)[0], [], "slots is empty"),
        (models.Residual(), models.images(6)[0], ["first"], "skip connection.*after the block"),
        (models.small_cnn(), models.images(6)[0], ["3", "9"], "different kinds.*same number of axes"),
        (models.small_mlp(), torch.randn(6, 4), None, "does not take inputs of shape.*make the data fit"),
        (nn.Bilinear(5, 5, 3), models.table(6)[0], None, "takes 2 inputs.*wrap it"),
    ],
)
def test_what_cannot_be_cut_is_told_in_one_sentence(
    model: nn.Module, sample: Tensor, slots: list[str] | None, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as told:
        cut(model, sample, slots)
    assert "\n" not in str(told.value)


def test_a_model_that_returns_a_dictionary_is_refused() -> None:
    class Dictionary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = models.small_mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.body(x)}

    with pytest.raises(UserError, match=r"returns a .*dict; it must return one tensor"):
        cut(Dictionary(), models.table(6)[0])


def test_tracing_leaves_torch_as_it_was() -> None:
    before = torch.arange
    cut(models.LanguageModel(), models.text(6)[0])
    cut(models.LanguageModel(), models.text(6)[0])
    assert torch.arange is before
    assert torch.equal(torch.arange(3), torch.tensor([0, 1, 2]))


class Encoder(nn.Module):
    """Every position hears every other."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])
        self.head = nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_attention_to_the_past_is_offered_only_where_the_model_is_causal() -> None:
    tokens = models.text(6)[0]
    assert cut(models.LanguageModel(), tokens).causal
    encoder = cut(Encoder(), tokens)
    assert not encoder.causal
    bodies = Population(lambda: encoder.host, PopulationConfig(), torch.arange(1))
    offered = SeedPrices(bodies, None, encoder.causal).choosable[0]
    assert not offered[[Blueprint.ATTENTION, Blueprint.FLEX_ATTENTION]].any()
    assert offered[Blueprint.MLP]
    assert SeedPrices(bodies, ["ATTENTION"], False).choosable[0, Blueprint.ATTENTION]
