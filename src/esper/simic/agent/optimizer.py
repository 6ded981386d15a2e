"""Adam whose steps can be refused on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class VetoAdam:
    """torch's fused Adam, with its state spelled out as plain tensors by parameter name.

    The fused kernel takes a `found_inf` number, made for loss scaling: at 1 it leaves weights, moments and
    step count untouched. That is a veto which never waits for the device.
    """

    def __init__(self, module: nn.Module, learning_rate: float, epsilon: float) -> None:
        self._parameters = dict(module.named_parameters())
        on_gpu = any(parameter.is_cuda for parameter in self._parameters.values())
        self._adam = torch.optim.Adam(
            self._parameters.values(), lr=learning_rate, eps=epsilon, fused=True, capturable=on_gpu
        )
        for parameter in self._parameters.values():
            self._adam.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def zero_grad(self) -> None:
        """Forget the gradients of the last minibatch."""
        self._adam.zero_grad(set_to_none=True)

    def step(self, vetoed: Tensor) -> None:
        """Take one step of Adam, or none at all where vetoed [] is True."""
        self._adam.found_inf = vetoed.float()  # type: ignore[attr-defined]
        self._adam.step()

    @torch.no_grad()
    def rescale(self, module: nn.Module, factor: Tensor) -> None:
        """Rescale a module's moments as if its gradients had been `factor` times as large.  # factor [1]"""
        for parameter in module.parameters():
            moments = self._adam.state[parameter]
            # The first moment is linear in the gradient, the second quadratic.
            moments["exp_avg"].mul_(factor)
            moments["exp_avg_sq"].mul_(factor.square())

    def state_dict(self) -> dict[str, Tensor]:
        """Return moments and step counts by `parameter.moment`; the tensors themselves, not copies."""
        return {
            f"{name}.{moment}": value
            for name, parameter in self._parameters.items()
            for moment, value in self._adam.state[parameter].items()
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the state with tensors of the same names and shapes; the caller checks them."""
        for name, own in self.state_dict().items():
            own.copy_(tensors[name])
