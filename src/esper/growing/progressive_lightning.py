"""Grow into the module of a Lightning Trainer: `Trainer(..., callbacks=[LightningProgressive()])`."""

from __future__ import annotations

from typing import Any

from esper.growing.progressive import PLAIN_CHECKPOINT, Progressive, end_training
from esper.utils.errors import UserError

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise UserError("lightning is not installed; pip install 'esper-lite[lightning]'") from error


class LightningProgressive(Callback):  # type: ignore[misc,unused-ignore]
    """Grow into the module that a Trainer trains; `options` are those of `esper.Progressive`.

    The state is part of the Trainer's checkpoints, so that `trainer.fit(..., ckpt_path=...)` goes on to the
    same bits. On several devices the strategy must be "ddp_find_unused_parameters_true".
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.grower: Progressive | None = None
        self.options = options
        self._saved: dict[str, Any] = {}  # waits for the optimizer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Skip blocks, or go on from a checkpoint."""
        if len(trainer.optimizers) != 1:
            raise UserError(f"the module has {len(trainer.optimizers)} optimizers; growth needs exactly one")
        steps = trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise UserError("the Trainer does not end; give it max_epochs or max_steps")
        each_step = (c for c in trainer.lr_scheduler_configs if c.interval == "step" and c.frequency == 1)
        scheduler = next((config.scheduler for config in each_step), None)
        # A later Trainer begins anew, the same one goes on. A test may have loaded a checkpoint in between.
        saved, self._saved = self._saved if trainer.global_step else {}, {}
        if trainer.global_step and not saved and self.grower is not None:
            saved = self.grower.state_dict()
        if trainer.global_step and not saved:
            raise UserError(PLAIN_CHECKPOINT)
        averages = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]
        also = [model for model in averages if model is not None]  # of Lightning's WeightAveraging
        options = {"scheduler": scheduler, "also": also, **self.options}
        # The strategy's model is the module itself or DistributedDataParallel around it, which is checked.
        self.grower = Progressive(trainer.strategy.model, trainer.optimizers[0], int(steps), **options)
        if saved:
            self.grower.load_state_dict(saved)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Count the steps of the optimizer, and grow where it is time."""
        assert self.grower is not None
        while self.grower.steps_done < trainer.global_step:  # several batches may make one step
            self.grower.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Activate all blocks where training ends before its time."""
        end_training(self.grower)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return self._saved if self.grower is None else self.grower.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a saved state until training starts."""
        self._saved = state_dict
