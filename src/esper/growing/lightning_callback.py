"""Growth inside Lightning's Trainer: a callback, and nothing else to change.

    grower = LightningGrower()
    trainer = Trainer(max_epochs=40, callbacks=[grower])
    trainer.fit(module, train_loader, val_loader)
    grower.grown           # the plain module, with what grew

Checkpoints of the Trainer hold the growth, and `trainer.fit(..., ckpt_path=...)` goes on to the same bits.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from esper.foundation.errors import UserError
from esper.growing.batches import UserStep
from esper.growing.callback import Grower
from esper.growing.request import several_processes

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise UserError("lightning is not installed; pip install 'esper-lite[lightning]'") from error


class LightningGrower(Callback):  # type: ignore[misc,unused-ignore]
    """Grows the module that a Trainer trains; one decision after each epoch.

    train, val: what seeds learn from and are judged by; the Trainer's own loaders if left out.
    epochs: how long growth lasts; the Trainer's max_epochs if left out.
    step: (module, batch) → loss, score. Without it a batch is (inputs, targets), and `forward` gives outputs.
    settings: those of `esper.Grower` (slots, controller, budget, blueprints, lr ...).

    The decision is made where validation ends, ahead of what saves checkpoints; without validation in the
    Trainer, at the end of the training epoch. `grown` is the plain module once training has ended, and the
    Trainer's module then has the weights of its best epoch, less what grew.
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        epochs: int | None = None,
        step: UserStep | None = None,
        **settings: Any,
    ):
        super().__init__()
        self.grower: Grower | None = None
        self.grown: nn.Module | None = None
        self.decisions: list[str] = []  # in words, epoch by epoch, of this process
        self._train, self._val, self._epochs, self._step_function = train, val, epochs, step
        self._settings = settings
        self._saved: dict[str, Any] = {}  # a state that waits for the optimiser to be there
        self._decided = -1  # the latest epoch that was decided after

    # ---- what Lightning calls --------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a training on several devices before it begins; raises a UserError."""
        if trainer.world_size > 1:
            raise several_processes(trainer.world_size)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, or go on from a checkpoint; raises a UserError where the Trainer gives too little."""
        if len(trainer.optimizers) != 1:
            raise UserError(f"the module has {len(trainer.optimizers)} optimisers; growth needs exactly one")
        epochs = self._epochs or trainer.max_epochs
        if not epochs or epochs < 1:
            raise UserError(f"the Trainer's max_epochs is {epochs}; give it, or give epochs, from 1 on")
        if self.grower is not None:
            self.grower.close()  # of a run that was broken off
        self.grower = Grower(
            pl_module,
            trainer.optimizers[0],
            train=self._train if self._train is not None else trainer.train_dataloader,
            val=self._val if self._val is not None else trainer.val_dataloaders,
            epochs=epochs,
            step=self._step_function,
            **self._settings,
        )
        self._decided = trainer.current_epoch - 1
        if self._saved:
            self.grower.load_state_dict(self._saved)
            self._saved = {}
            # Lightning drew the order of the first epoch before the random numbers were put back.
            iter(trainer.fit_loop._data_fetcher)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Decide, if this is the validation at the end of a training epoch."""
        if not trainer.sanity_checking and trainer.is_last_batch:
            self._decide(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Decide, if no validation was there to do it at."""
        self._decide(trainer.current_epoch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Decide every seed, and take the hooks off."""
        if self.grower is not None:
            self.grown = self.grower.finish()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds; nothing before training has begun."""
        return self._saved if self.grower is None else self.grower.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint held until training begins."""
        self._saved = state_dict

    def _decide(self, epoch: int) -> None:
        if self.grower is not None and epoch > self._decided:
            self._decided = epoch
            self.decisions.append(self.grower.step())
