"""The study of shifting streams: networks against a plain loop, policies by hand, no optimism."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schedulefree
import torch
from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
from torch import Tensor, nn

from studies.headroom import analysis
from studies.streams import __main__ as streams
from studies.streams import policies, predictor
from studies.streams.data import APART, BATCH, CLASSES, FEATURES, MOST_SHIFTS, SHAPES, Bank, make_stream
from studies.streams.networks import BETAS, CLIP, DECAY, SIZES, Seen, train, train_schedule_free
from studies.streams.policies import EVERY, Controlled

RULE = (0.2, 12.0, 0.04, 4.0, 2.0, 1e-6)  # rise, half-life, first rate, factor, response, ending


@pytest.fixture
def bank() -> Bank:
    """Three streams with two twins each; the first stream has shifts."""
    shifting = next(seed for seed in range(40) if len(make_stream(36, seed).shifts) >= 2)
    return Bank(36, (shifting, 100, 101), 2)


def test_a_stream_is_drawn_again_alike_and_its_shifts_lie_apart() -> None:
    counts = set()
    for seed in range(60):
        stream = make_stream(96, seed)
        counts.add(len(stream.shifts))
        places = [0, *(at for at, _, _ in stream.shifts), 96]
        assert min(b - a for a, b in itertools.pairwise(places)) >= APART
        assert not stream.inputs[:, stream.features :].any()
        assert len(stream.targets.unique()) == stream.classes
    assert counts == set(range(MOST_SHIFTS + 1))
    again = make_stream(96, 59)
    assert torch.equal(again.inputs, stream.inputs)
    assert torch.equal(again.targets, stream.targets)


def test_twins_see_the_same_samples_of_each_rule_in_another_order(bank: Bank) -> None:
    first_shift = bank.streams[0].shifts[0][0]
    parts = [bank.minibatch(step)[0][:2] for step in range(first_shift)]
    one, other = torch.stack(parts).transpose(0, 1).reshape(2, first_shift * BATCH, FEATURES)
    assert not torch.equal(one, other)
    assert torch.equal(one.sum(1).sort().values, other.sum(1).sort().values)
    assert not torch.equal(bank.initial[0], bank.initial[1])


def module_of(weights: Tensor) -> nn.Sequential:
    """Return a network of these parameters."""
    network = nn.Sequential(*(nn.Linear(a, b) for a, b in SHAPES))
    network.insert(1, nn.ReLU())
    network.insert(3, nn.ReLU())
    parts = weights.split(SIZES)
    with torch.no_grad():
        for k, layer in enumerate(layer for layer in network if isinstance(layer, nn.Linear)):
            layer.weight.copy_(parts[2 * k].view(SHAPES[k]).T)
            layer.bias.copy_(parts[2 * k + 1])
    return network


def plain_scores(bank: Bank, row: int, rates: list[float], responses: list[int], free: bool) -> list[float]:
    """Train one network in a plain loop; the slow reference of `train` and `train_schedule_free`."""
    network, classes, right = module_of(bank.initial[row]), int(bank.classes[row]), []

    def optimizer_of() -> Any:
        if free:
            warm = round(0.03 * bank.length)
            kind = {"betas": BETAS, "weight_decay": DECAY, "warmup_steps": warm}
            return schedulefree.AdamWScheduleFree(network.parameters(), lr=rates[0], **kind)
        return torch.optim.AdamW(network.parameters(), betas=BETAS, weight_decay=DECAY)

    optimizer = optimizer_of()
    for step, (rate, response) in enumerate(zip(rates, responses, strict=True)):
        if response:
            optimizer = optimizer_of()
        if response == 2:
            network[-1].load_state_dict(module_of(bank.initial[row])[-1].state_dict())
        inputs, targets = (x[row] for x in bank.minibatch(step))
        for mode in (optimizer.eval, optimizer.train) if free else (lambda: None,):
            mode()
            logits = network(inputs)[:, :classes]
            if len(right) == step:
                right.append(float((logits.argmax(1) == targets).float().mean()))
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, targets).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    if free:
        optimizer.eval()
    inputs, targets = (x[row] for x in bank.last_rule())
    end = float((network(inputs)[:, :classes].argmax(1) == targets).float().mean())
    return [100.0 * float(np.mean(right)), 100.0 * end]


def test_networks_train_as_in_a_plain_loop(bank: Bank) -> None:
    rates = torch.tensor([0.04, 0.02])[:, None] * (1.0 - torch.arange(bank.length) / 50)
    responses = torch.zeros(2, bank.length, dtype=torch.long)
    responses[0, 12], responses[0, 20], responses[1, 7] = 1, 2, 2
    each, moves = (x.repeat_interleave(bank.rows, 0) for x in (rates, responses))
    scores = train(bank, lambda step, _: (each[:, step], moves[:, step]), 2)
    assert scores.shape == (2, bank.rows, 2)
    for arm, row in ((0, 0), (0, 3), (1, 1), (1, 5)):
        expected = plain_scores(bank, row, rates[arm].tolist(), responses[arm].tolist(), free=False)
        assert scores[arm, row].tolist() == pytest.approx(expected, abs=0.5)  # rounding may flip an answer
    free = train_schedule_free(bank, 0.08)
    for row in (0, 4):
        expected = plain_scores(bank, row, [0.08] * bank.length, [0] * bank.length, free=True)
        assert free[0, row].tolist() == pytest.approx(expected, abs=0.5)


def test_plans_fall_from_their_start_and_follow_the_segments(bank: Bank) -> None:
    policy = policies.fixed_policy(bank, torch.tensor([[0.02, 0.5], [0.04, 1.0]]))
    rates = [policy(step, Seen(torch.zeros(0), torch.zeros(0)))[0] for step in (0, 18, 27)]
    assert [float(r[0]) for r in rates] == pytest.approx([0.02, 0.02, 0.01])
    assert [float(r[-1]) for r in rates] == pytest.approx([0.04] * 3)
    plans = policies.oracle_plans(bank, (4, 0, *(5, 2, 1), *(5, 2, 1), *(5, 2, 1)))[None]
    policy = policies.segment_policy(bank, plans)
    at, following = (place for place, _, _ in bank.streams[0].shifts[:2])
    seen = Seen(torch.zeros(0), torch.zeros(0))
    assert float(policy(at - 1, seen)[0][0]) == pytest.approx(policies.RATES[4])
    assert float(policy(at, seen)[0][0]) == pytest.approx(policies.RATES[5])
    last = policy(following - 1, seen)[0][0]
    assert float(last) == pytest.approx(policies.RATES[5] / (following - at))  # linear to 0 in its segment
    assert [int(policy(step, seen)[1][0]) for step in (0, at - 1, at, at + 1)] == [0, 0, 1, 0]


def test_the_rule_raises_the_rate_and_restarts_once_where_the_loss_rises(bank: Bank) -> None:
    policy, seen = Controlled(bank, torch.tensor([RULE])), Seen(*torch.ones(2, bank.rows, bank.length))
    seen.losses[:, 2 * EVERY :] = 2.0  # twice the loss from the third decision on
    found = [policy(step, seen) for step in range(5 * EVERY)]
    at = [(float(found[k * EVERY][0][0]), int(found[k * EVERY][1][0])) for k in range(5)]
    half = 2.0**-0.5  # EVERY is half of the half-life
    assert [rate for rate, _ in at] == pytest.approx([0.04, 0.04 * half, 0.02, 0.04, 0.04 * half])
    assert [response for _, response in at] == [0, 0, 0, 2, 0]
    told, still = Controlled(bank, torch.tensor([RULE]), told=True), torch.ones(2, bank.rows, bank.length)
    responses = torch.stack([told(step, Seen(*still))[1] for step in range(bank.length)])  # [length, rows]
    for row, stream in enumerate(bank.stream_of.tolist()):
        due = {EVERY * (place // EVERY + 1) for place, _, _ in bank.streams[stream].shifts}
        assert set(responses[:, row].nonzero()[:, 0].tolist()) == due - {bank.length}


def test_a_forced_action_is_taken_once_and_its_features_are_noted(bank: Bank) -> None:
    rows = torch.full((2 * bank.rows,), 12), torch.tensor([0, 2]).repeat_interleave(bank.rows)
    policy = Controlled(bank, torch.tensor([RULE] * 2), forced=rows)
    seen = Seen(*torch.ones(2, 2 * bank.rows, bank.length))
    rates = [policy(step, seen)[0][[0, -1]].tolist() for step in range(20)]
    assert rates[11][0] == rates[11][1]
    assert rates[12] == pytest.approx([0.02, 0.08 * 2.0**-0.5])  # ×2 instead of the rule's decay
    assert rates[18][1] == pytest.approx(0.08 * 0.5)
    assert policy.noted.shape[1] == 20
    assert torch.equal(policy.noted[0, :3], policy.facts[0])


def test_responses_are_due_after_shifts_until_they_are_given(bank: Bank) -> None:
    oracle = (4, 0, *(4, 0, 1), *(4, 0, 2), *(4, 0, 2))
    given = (1e9, *RULE[1:])  # never reacts by itself
    features, due = predictor.imitate(bank, given, oracle, None)
    due = due.reshape(-1, bank.rows)  # [decisions, rows]
    assert len(features) == due.size
    responses = policies.oracle_plans(bank, oracle)[:, :, 2]
    for index, (place, _, _) in enumerate(bank.streams[0].shifts, start=1):
        decision = place // EVERY  # of due: row k is the decision at minibatch (k + 1) * EVERY
        if decision < len(due):
            assert due[decision, 0] == responses[0, index]
    assert (due[:, 0] > 0).sum() > len(bank.streams[0].shifts) - 1
    quiet = [k for k, stream in enumerate(bank.streams) if not stream.shifts]
    assert not due[:, [2 * k for k in quiet]].any()


def test_branches_weigh_each_decision_as_often_as_it_comes() -> None:
    bank = Bank(30, range(150), 1)
    _, gains, weights = predictor.branch(bank, RULE, None, np.random.default_rng(0))
    assert gains.shape == (150, len(policies.ACTIONS) - 1)
    assert float(weights.mean()) == pytest.approx(1.0, abs=0.1)
    assert gains.any()


def test_luck_in_the_search_earns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Bank(36, range(60), 4)

    def noise(_: Bank, plans: Tensor, __: object) -> Tensor:  # by the plan and the row, but worth nothing
        key = (plans * torch.arange(1, 16).view(5, 3)).sum((2, 3)) * 12.9898 + torch.arange(
            bank.rows
        ) * 78.233
        return (torch.sin(key) * 43758.5453).frac()[..., None].repeat(1, 1, 2)

    monkeypatch.setattr(policies, "in_parts", noise)
    honest, lucky = policies.hindsight(bank, streams.ORACLE_START, rounds=2, tries=10).mean((1, 2)).tolist()
    assert abs(honest) < 0.15
    assert lucky > 0.4


def made_records(told: float, count: int = 150) -> list[dict[str, Any]]:
    """Records in which the best plan wins 4 points, the rule 1, and the predictor `told` more than that."""
    rng = np.random.default_rng(0)
    gains = dict.fromkeys((*streams.SHOWN, streams.FUNCTION), 0.0)
    gains |= {streams.HINDSIGHT: 4.0, streams.LUCKY: 5.0, streams.RULE: 1.0, streams.PREDICTOR: 1.0 + told}
    first = {"tuned": {"constant rate": [0.04, 1.0]}, "predictors": [["rule", 60.0], ["forest", 61.0]]}
    found: list[dict[str, Any]] = [first]
    for k in range(count):
        level = rng.normal(60, 10)
        scores = {n: (level + gain + rng.normal(0, 1, (4, 2))).tolist() for n, gain in gains.items()}
        found.append({"length": (96, 192)[k % 2], "shifts": [[9, "rule", 0.5]] * (k % 3), "arms": scores})
    return found


def test_the_report_says_what_follows() -> None:
    lost = streams.report(made_records(0.2))
    assert "H3 is against: reactive rule." in lost
    assert "H3 is under 0.3 of H1" in lost
    assert "has something to decide" in streams.report(made_records(2.0))
    line = next(line for line in lost.splitlines() if line.startswith("| H1 |"))
    assert float(line.split("|")[2]) == pytest.approx(4.0, abs=0.3)


@pytest.mark.long
def test_the_whole_study_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "LENGTHS": (30, 36), "FIXED": ((0.02, 1.0), (0.04, 0.5)), "FREE_RATES": (0.04,),
        "RULE_GRIDS": ((0.2, 0.4), (48,), (0.04,), (4,), (0, 2), (1e-6,)),
        "ORACLE_GRIDS": ((4, 5), *((0,),) * 10), "Scale": lambda: scale,
    }  # fmt: skip
    scale = streams.Scale(tuned=4, trained=2, judged=5, twins=2, repeats=1, rounds=1, tries=2, sweeps=1)
    for name, value in small.items():
        monkeypatch.setattr(streams, name, value)
    monkeypatch.setattr(predictor, "CLASSIFIERS", {"forest": lambda: ExtraTreesClassifier(5, random_state=0)})
    monkeypatch.setattr(predictor, "REGRESSORS", {"forest": lambda: ExtraTreesRegressor(5, random_state=0)})
    monkeypatch.setattr(analysis, "MODELS", {"tree": analysis.MODELS["tree"]})
    monkeypatch.setattr(predictor, "THRESHOLDS", (0.5,))
    monkeypatch.setattr(predictor, "MARGINS", (0.2,))
    out = tmp_path / "streams.jsonl"
    streams.main(["--out", str(out)])
    printed = capsys.readouterr().out
    first, *records = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["tuned"][streams.RULE][0] in (0.2, 0.4)
    assert [record["length"] for record in records] == [30] * 5 + [36] * 5
    for record in records:
        assert set(record["arms"]) >= {streams.PREDICTOR, streams.HINDSIGHT, *streams.SHOWN}
        assert all(np.shape(each) == (2, 2) for each in record["arms"].values())
        assert 2 <= record["classes"] <= CLASSES
    packed = tmp_path / "streams.jsonl.gz"
    packed.write_bytes(gzip.compress(out.read_bytes()))
    streams.main(["--read", str(packed)])
    assert capsys.readouterr().out == printed
