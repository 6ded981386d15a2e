"""`esper.estimate` and `esper estimate`: the law is the one of the raw files, and advice follows from it."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import esper
from benchmarks.textbook import GPT
from esper import cli
from esper.cli import app
from esper.growing.blocks import count_flops
from esper.growing.criterion import count_tokens
from esper.growing.estimate import SAMPLES, TOKENS, count_parameters
from esper.utils.errors import UserError
from studies import growth_law
from tests.growing.test_progressive import make


def test_the_law_is_fitted_to_the_committed_runs() -> None:
    found = growth_law.points()
    points = growth_law.for_the_law(found)
    assert (TOKENS.saves, TOKENS.fade) == pytest.approx(growth_law.fit(points), abs=0.001)
    seen = [p.targets for p in points]
    assert TOKENS.measured == pytest.approx((min(seen), max(seen)), rel=0.05)
    # Half of the depth is level or ahead in the runs below the limit, and behind in those above it.
    text = [p for p in found if p.family.startswith("gpt")]
    assert all((p.ahead_of_half < 0) == (p.targets < TOKENS.smaller_below) for p in text)
    assert TOKENS.most == pytest.approx(max(seen), rel=0.05)
    assert TOKENS.saved(TOKENS.most) > TOKENS.margin
    for left in points:
        saves, fade = growth_law.fit([p for p in points if p is not left])
        predicted = saves - fade * math.log(left.targets / 20)
        assert predicted == pytest.approx(left.saved, abs=TOKENS.margin / 4), f"{left.budget:g}"


@pytest.mark.parametrize("tokens", [3.5, 10.0, 21.0, 40.0])
def test_with_as_many_steps_as_plain_training_growth_saves_no_more_than_is_certain(tokens: float) -> None:
    at = TOKENS.grow_at(tokens, equal_compute=False)
    assert 0 < at <= TOKENS.grow_at(tokens)
    assert at / 2 <= TOKENS.saved(tokens) - TOKENS.margin + 1e-9  # half of the blocks cost half


@pytest.mark.parametrize(
    ("tokens", "advice", "grow_at"),
    [
        (2.0, "take half of the depth", 2 / 3),
        (16.0, "grow", 0.45),
        (39.0, "grow", 0.21),
        (50.0, "do not grow", None),
    ],
)
def test_advice_follows_from_tokens_per_parameter(tokens: float, advice: str, grow_at: float | None) -> None:
    model = GPT(256, 16, 256, 8, 4)
    parameters = sum(p.numel() for name, p in model.named_parameters() if "tokens" not in name)
    parameters -= model.positions.weight.numel()
    expected = esper.estimate(model, tokens=tokens * parameters)
    assert expected.parameters == parameters
    assert expected.per_parameter == pytest.approx(tokens)
    assert expected.advice == advice
    assert expected.grow_at == (None if grow_at is None else pytest.approx(grow_at, abs=0.01))
    assert expected.flops == pytest.approx(6 * (parameters + 256 * 256) * tokens * parameters)  # the head
    assert expected.saved == (TOKENS.saved(tokens) if grow_at else 0.0)
    assert f"{advice}: training sees" in str(expected)
    assert len(repr(expected)) < 200
    assert ("outside of the range that was fitted" in str(expected)) == (not 14.2 <= tokens <= 43.0)
    assert ("fewer FLOPs" in str(expected)) == (advice == "grow"), "a saving that is no gain is not quoted"


@pytest.mark.parametrize(("epochs", "advice"), [(1, "grow"), (5, "grow"), (6, "do not grow")])
def test_what_repeats_more_often_than_measured_is_trained_plainly(epochs: int, advice: str) -> None:
    model = GPT(256, 16, 256, 8, 4)
    expected = esper.estimate(model, tokens=20 * count_parameters(model), epochs=epochs)
    assert (expected.advice, expected.grow_at is None) == (advice, advice != "grow")
    assert ("training takes 6 epochs" in expected.reason) == (epochs == 6)


@pytest.mark.parametrize(
    ("width", "tokens", "limit"),
    [
        (32, 20, "below 3,000,000 growth was ahead in some runs"),
        (32, 60, "below 3,000,000 growth was ahead in some runs"),  # not by a law of larger models
        (128, 20, "below 3,000,000 growth was ahead in some runs"),
        (448, 10, "above 15,000,000 growth was level"),
        (448, 20, "above 15,000,000 growth was level"),
    ],
)
def test_language_models_of_other_sizes_are_trained_plainly(width: int, tokens: int, limit: str) -> None:
    model = GPT(256, 16, width, 8, 2)
    expected = esper.estimate(model, tokens=tokens * count_parameters(model))
    assert (expected.advice, expected.grow_at) == ("do not grow", None)
    assert f"parameters without embeddings, and {limit}" in expected.reason


class TiedGPT(GPT):
    """A GPT whose output layer is a function of the embedding's weight, and no module."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary, 16, 256, 8, 4)
        self.head = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.linear(super().forward(tokens), self.tokens.weight)


@pytest.mark.parametrize(("vocabulary", "advice"), [(256, "grow"), (20_000, "do not grow")])
def test_with_an_example_an_output_layer_counts_that_is_no_module(vocabulary: int, advice: str) -> None:
    model = TiedGPT(vocabulary)
    tokens, example = 20 * count_parameters(model), torch.zeros(1, 16, dtype=torch.long)
    found = esper.estimate(model, tokens=tokens, example=example)
    assert found.advice == advice
    of_head = 2 * 256 * vocabulary * 16
    assert found.share == pytest.approx(1 - of_head / count_flops(model, example), rel=1e-3)


@pytest.mark.parametrize(
    ("layers", "tokens", "advice"),
    [(7, 20, "do not grow"), (8, 20, "grow"), (7, 10, "take half of the depth")],
)
def test_fewer_blocks_than_measured_are_not_grown(layers: int, tokens: int, advice: str) -> None:
    model = GPT(256, 16, 256, layers, 4)
    expected = esper.estimate(model, tokens=tokens * count_parameters(model))
    assert (expected.advice, expected.grow_at is None) == (advice, advice != "grow")
    assert ("has 7 blocks; savings were measured from 8 on" in expected.reason) == (advice == "do not grow")


def byte_model(kind: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, **settings}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=256, n_layer=8, n_head=4, n_positions=32, **common)
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    if kind == "T5":  # its T5LayerNorm is an RMSNorm
        config = transformers.T5Config(d_model=256, d_ff=1024, num_layers=8, num_heads=4, vocab_size=256)
        return transformers.T5EncoderModel(config)  # type: ignore[no-any-return]
    width = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 8, "intermediate_size": 700}
    config = getattr(transformers, f"{kind}Config")(**width, **common)
    return getattr(transformers, f"{kind}ForCausalLM")(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("gpt2", {}, ""),
        ("Llama", {}, "LlamaForCausalLM has no LayerNorm in its blocks"),
        ("T5", {}, "T5EncoderModel has no LayerNorm in its blocks"),
        ("gpt2", {"vocab_size": 20_000}, "55 % of GPT2LMHeadModel is in blocks that run for each token"),
        (
            "gpt2",
            {"vocab_size": 20_000, "tie_word_embeddings": False},
            "55 % of GPT2LMHeadModel is in blocks",
        ),
    ],
    ids=str,
)
def test_models_unlike_those_that_were_measured_are_trained_plainly(
    kind: str, settings: dict[str, Any], reason: str
) -> None:
    model = byte_model(kind, **settings)
    expected = esper.estimate(model, tokens=20 * count_parameters(model))
    assert expected.advice == ("do not grow" if reason else "grow")
    assert reason in str(expected)
    assert ("fewer FLOPs" in str(expected)) == (not reason)


def test_experts_that_a_token_does_not_take_are_no_part_of_what_growth_skips() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(64)
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(100))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.experts[0](self.norm(x))
            return out

    model = nn.Sequential(*[Experts() for _ in range(8)])
    example = torch.randn(1, 1, 64)
    expected = esper.estimate(model, tokens=20 * count_parameters(model), example=example)
    assert expected.advice == "do not grow"
    assert " % of Sequential is in blocks that run for each token" in expected.reason
    branches = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(8))

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = branches

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([branch(x) for branch in self.branches]).sum(0)

    assert esper.estimate(Parallel(), tokens=1e3, example=torch.zeros(1, 1, 4)).blocks == 0


def test_flops_are_counted_where_an_example_is_given() -> None:
    model = make(8)
    forward = esper.estimate(model, samples=10, epochs=3, example=(torch.zeros(1, 4),)).flops / 90
    bare = esper.estimate(model, samples=10, epochs=3, example=torch.zeros(1, 4))
    assert bare.flops == 90 * forward
    assert forward == 2 * sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert esper.estimate(make(3), samples=10).advice == "do not grow"
    assert "3 blocks" in esper.estimate(make(3), samples=10).reason
    convolution = nn.Conv2d(1, 1, 3)
    assert "FLOPs" not in str(esper.estimate(convolution, samples=10))
    example = (torch.zeros(1, 1, 5, 5),)
    assert esper.estimate(convolution, samples=10, example=example).flops == 3 * 10 * 2 * 9 * 9


IDS = torch.arange(6).reshape(2, 3)
WIDE = torch.zeros(2, 5, 8)


@pytest.mark.parametrize(
    ("example", "tokens"),
    [
        ({"mask": torch.zeros(2, 1, 3, 3), "input_ids": IDS}, 6),
        ({"input_ids": IDS.repeat(1, 4), "decoder_input_ids": IDS}, 6),
        ({"input_ids": IDS.repeat(1, 4), "decoder_input_ids": IDS.repeat(1, 2), "labels": IDS}, 6),
        ({"input_ids": IDS, "labels": IDS[:, 0]}, 6),
        ({"input_features": WIDE, "decoder_input_ids": IDS}, 6),
        ({"inputs_embeds": WIDE}, 10),
        ({"inputs_embeds": WIDE, "mask": torch.ones(5, 5, dtype=torch.bool)}, 10),
        (WIDE, 10),
        ((IDS.int(), torch.zeros(2)), 6),
        (torch.zeros(2, 8), None),
        ({"pixel_values": torch.zeros(2, 3, 4, 4)}, None),
    ],
)
def test_tokens_of_an_example_are_its_labels_ids_or_steps(example: Any, tokens: int | None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, *_: Any, **__: Any) -> Tensor:
            out: Tensor = self.layer(torch.zeros(60, 8))
            return out

    if tokens is None:
        with pytest.raises(UserError, match="example has no tokens"):
            esper.estimate(Model(), tokens=1e3, example=example)
        return
    found = esper.estimate(Model(), tokens=1e3, example=example)
    assert found.flops == pytest.approx(3 * 1e3 * 2 * 64 * 60 / tokens)


@pytest.mark.parametrize("per_parameter", [0.5, 1.5, 2.0, 20.0])
def test_with_one_label_a_sample_nothing_grows(per_parameter: float) -> None:
    model = make(8)
    parameters = sum(p.numel() for p in model.parameters())
    expected = esper.estimate(model, samples=per_parameter * parameters / 4, epochs=4)
    assert expected.grow_at is None
    assert (expected.advice == "do not grow") == (per_parameter >= SAMPLES.smaller_below)
    assert ("half of the depth was ahead" in expected.reason) == (per_parameter == 1.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "neither tokens nor samples are given; give --tokens N .* or --samples N"),
        (
            {"tokens": 1.0, "samples": 1.0},
            "both tokens and samples are given; give --tokens N .* --samples N",
        ),
        ({"tokens": 0.0}, "tokens is 0.0; give a number above 0"),
        ({"samples": float("inf")}, "samples is inf; give a number above 0"),
        ({"tokens": "many"}, "tokens is 'many'; give a number above 0"),
        ({"tokens": 1.0, "epochs": 0}, "epochs is 0; give a number above 0"),
        ({"tokens": 1.0, "model": 3}, "the model is an int; give an nn.Module"),
    ],
)
def test_what_cannot_be_estimated_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        esper.estimate(**{"model": nn.Linear(2, 2), **options})


OWN_FILE = """from tests.growing.test_progressive import make
def build(): return make(8)
def boom(): raise KeyError("boom")
def given(x): return x
three, x = lambda: 3, 3
def leaves(): raise SystemExit(3)
"""


# A file of the name of a module of Python is the user's, and so is one outside of the current folder.
@pytest.mark.parametrize("file", ["estimated_model.py", "nturl2path.py", "below/estimated.py", "../above.py"])
def test_the_command_reads_a_file_of_the_user(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path(file).write_text(OWN_FILE)
    for name in (file, str(Path(file).resolve())):
        done = CliRunner().invoke(app, ["estimate", f"{name}:build", "--tokens", "1e4"])
        assert done.exit_code == 0, done.output
        assert "Sequential: 254 parameters without embeddings, 8 equal blocks" in done.stdout


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (None, "plain training: 100 samples\n"),
        # 2 · 3 · 3 · 3 · 4 products for each of 36 places, three times for the backward pass.
        ("images", f"plain training: 100 samples, {2 * 108 * 36 * 3 * 100:.3g} FLOPs\n"),
        ("wide", "does not run on example="),
        ("none", "and estimated_images.py has no function none"),
    ],
)
def test_the_command_counts_the_flops_of_an_example(
    example: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "estimated_images", raising=False)
    Path("estimated_images.py").write_text(
        "import torch\n"
        "def make(): return torch.nn.Conv2d(3, 4, 3, padding=1, bias=False)\n"
        "def images(): return torch.zeros(1, 3, 6, 6)\n"
        "def wide(): return torch.zeros(1, 5, 6, 6)\n"
    )
    options = [] if example is None else ["--example", f"estimated_images.py:{example}"]
    done = CliRunner().invoke(app, ["estimate", "estimated_images.py:make", "--samples", "100", *options])
    assert said in (done.output or str(done.exception)), done.output


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("none.py:build", "the model is 'none.py:build', and the file none.py does not exist; give FILE.py:"),
        (
            "none:build",
            "could not be called: No module named 'none'; give FILE.py:FUNCTION or MODULE:FUNCTION",
        ),
        ("estimated_wrong.py", "and that names no function; give FILE.py:FUNCTION"),
        ("estimated_wrong.py:", "and that names no function; give FILE.py:FUNCTION"),
        (":build", "and that names no function; give FILE.py:FUNCTION"),
        ("estimated_wrong.py:four", "and estimated_wrong.py has no function four; give FILE.py:FUNCTION"),
        (
            "estimated_wrong.py:boom",
            "it could not be called: KeyError: 'boom' at {file}, line 3; give FILE.py:",
        ),
        (
            "estimated_wrong.py:leaves",
            "it could not be called: SystemExit: 3 at {file}, line 6; give FILE.py:",
        ),
        (
            "estimated_wrong.py:given",
            "missing 1 required positional argument: 'x'; give .* takes no arguments",
        ),
        ("estimated_wrong.py:x", "'int' object is not callable; give FILE.py:FUNCTION"),
        ("estimated_wrong.py:three", "the model is an int; give an nn.Module"),
    ],
)
def test_a_model_that_cannot_be_made_is_one_sentence(
    named: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "estimated_wrong.py"
    file.write_text(OWN_FILE)
    monkeypatch.delitem(sys.modules, "estimated_wrong", raising=False)
    assert cli.run(["estimate", named, "--tokens", "1"]) == 2
    told = capsys.readouterr().err
    assert re.search(said.format(file=re.escape(str(file))), told), told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("batch", "targets", "tokens"),
    [
        ((IDS, IDS), IDS, 6),
        ((IDS, IDS), IDS.masked_fill(IDS > 3, -100), 4),
        ({"input_ids": IDS, "labels": IDS}, None, 6),
        ({"input_ids": IDS, "labels": IDS[:, 0]}, None, 0),
        ({"input_ids": IDS}, None, 6),
        (IDS, None, 6),
        ((IDS, IDS[:, 0]), IDS[:, 0], 0),
        ((IDS, IDS[:, :, None]), IDS[:, :, None], 0),
        ((IDS.float(), IDS.float()), IDS.float(), 0),
        ((IDS, IDS[:, 0]), None, 0),
        ((IDS, IDS), None, 6),
        ([IDS.float(), IDS], None, 6),
        ((), None, 0),
    ],
)
def test_tokens_are_rows_of_whole_numbers(batch: Any, targets: torch.Tensor | None, tokens: int) -> None:
    assert count_tokens(batch, targets) == tokens


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("times", [1, 3])
def test_grow_follows_the_law_of_tokens(times: int) -> None:
    """At 20 tokens a parameter a GPT is grown into, at the time that the law says.

    times: as much data as an epoch reads
    """
    torch.manual_seed(0)
    model, text = GPT(8, 64, 8, 4, 2), torch.randint(8, (1024, 65))
    parameters = count_parameters(model)
    rows = 32 * round(20 * parameters / 64 / 32)
    data = text[torch.arange(times * rows) % 1024]
    grown = esper.grow(
        model,
        (data[:, :-1], data[:, 1:]),
        (text[:64, :-1], text[:64, 1:]),
        controller="into",
        epochs=1,
        batch_size=32,
        batches_per_epoch=rows // 32,
        progress=False,
    )
    share = TOKENS.grow_at(20, equal_compute=False)
    assert (
        f"2 of 4 blocks train for the first {round(share * rows / 32):,} of {rows // 32:,} steps"
        in grown.remarks[0]
    )
