"""Where a run takes place, by name."""

from __future__ import annotations

import pytest
import torch

from esper.utils.devices import ANY, choose_device
from esper.utils.errors import UserError


def test_a_living_model_may_be_on_a_kind_of_device_that_a_population_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="this runs on cpu and cuda"):
        choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="sees no such device; choose cpu"):
        choose_device("mps", kinds=ANY)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("mps", kinds=ANY).type == "mps"
