"""The numbers of small runs are those that were recorded."""

from __future__ import annotations

import platform
from functools import cache

import numpy as np
import pytest

from tests.golden.record import Digest, differences, digest, digests, load, machine
from tests.golden.scenes import OF_THIS_PYTHON, SAME, SCENES


@cache
def found(scene: str) -> dict[str, Digest]:
    return digests(SCENES[scene]())


@pytest.mark.parametrize("scene", SCENES)
def test_a_scene_has_the_recorded_numbers(scene: str) -> None:
    recorded = load()
    if scene in OF_THIS_PYTHON and recorded["python"] != platform.python_version():
        pytest.skip("its data are the sources of another Python")
    exact = recorded["machine"] == machine()
    lost = differences(found(scene), recorded["scenes"][scene], exact)
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("scene", SAME)
def test_resumed_or_shared_it_has_the_same_bits(scene: str) -> None:
    for how, series in SAME[scene]():
        lost = differences(digests(series), found(scene), exact=True)
        assert not lost, f"{how}:\n" + "\n".join(lost)


def test_names_do_not_matter_and_numbers_do() -> None:
    one, two = np.array([1.0, 2.0]), np.array([3.0, -1.0])
    recorded = digests({"a": one, "b": two})
    near = one * (1 + 1e-6)
    for exact in (True, False):
        assert differences(digests({"c": two, "d": one, "new": one}), recorded, exact) == []
        (lost,) = differences(digests({"a": one, "b": two + 1}), recorded, exact)
        assert lost.startswith("b: recorded")
        assert len(differences(digests({"a": one, "b": near}), recorded, exact)) == 1
    assert differences(digests({"a": near, "b": two}), recorded, exact=False) == []
    assert len(differences(digests({"a": near, "b": two}), recorded, exact=True)) == 1
    assert digest(one)["sha256"] != digest(one.astype(np.float32))["sha256"]
