"""The study of residual networks on images: its images, and that every arm is trained and told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from esper.utils.gather import Alone
from studies import glyphs, resnet
from studies.equal_compute import comparison


def test_every_sign_is_drawn_in_every_font_and_no_two_alike() -> None:
    signs = glyphs.drawn_signs()
    assert signs.shape[:2] == (len(glyphs.SIGNS), 20)
    assert (signs.flatten(2).amax(2) > 0.5).all()
    assert len({tuple(row) for row in signs[:, 0].flatten(1).tolist()}) == len(glyphs.SIGNS)


def test_images_are_the_same_each_time_and_each_is_bent_in_its_own_way() -> None:
    one, two = (glyphs.make_task(12, (80, 40, 5)) for _ in range(2))
    assert torch.equal(one.train.inputs, two.train.inputs)
    still = glyphs.drawn_signs()[:1, 0].expand(2, -1, -1)
    first, second = glyphs.bent(still, 12, torch.Generator().manual_seed(1))
    assert (first - second).abs().max() > 1.0


def test_growth_ends_as_deep_as_the_deepest_fixed_network(tmp_path: Path) -> None:
    size = replace(resnet.QUICK, budgets=(6e7,), members=1, images=(80, 40, 20), per_step=1)
    resnet.study(size, [0], "cpu", tmp_path, Alone())
    found = resnet.results_in(tmp_path, size)
    (results,) = found.values()
    assert results[-1].parameters == results[-2].parameters
    assert [result.spent for result in results] == [[6e7]] * 4
    told = comparison(found, "test_accuracy").splitlines()
    assert len(told) == 2 + len(results) + 2
    assert told[-1].startswith("| grown minus fixed, 4 blocks a stage | ")
