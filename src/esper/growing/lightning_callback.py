"""A callback that grows the module of a Lightning Trainer.

    grower = LightningGrower()
    trainer = Trainer(max_epochs=40, callbacks=[grower])
    trainer.fit(module, train_loader, val_loader)
    grower.grown           # the plain module, with what grew

Checkpoints of the Trainer hold the growth, and `trainer.fit(..., ckpt_path=...)` goes on to the same bits,
from whatever step they were saved on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.growing.api import several_processes
from esper.growing.criterion import UserStep
from esper.growing.data import GeneratorStates
from esper.growing.grower import Grower
from esper.utils.errors import UserError
from esper.utils.rows import add_prefix, strip_prefix

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise UserError("lightning is not installed; pip install 'esper-lite[lightning]'") from error


class LightningGrower(Callback):  # type: ignore[misc,unused-ignore]
    """Grows the module that a Trainer trains; one decision after each epoch.

    train, val: data that seeds are trained and measured on; the Trainer's own loaders if left out.
    epochs: how long growth lasts; the Trainer's max_epochs if left out.
    step: (module, batch) → loss, score. Without it a batch is (inputs, targets), and `forward` gives outputs.
    settings: those of `esper.Grower` (slots, controller, budget, blueprints, lr ...).

    The decision is made at the end of validation, before checkpoints are saved; without validation in the
    Trainer, at the end of the training epoch. `grown` is the plain module once training has ended, and the
    Trainer's module then has the weights of its best epoch, without what grew.
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
        self._saved: dict[str, Any] = {}  # the state of a checkpoint, until the optimizer exists
        self._first = 0  # the epoch that growth began with
        self._begun = -1  # the epoch whose order was drawn when training began
        self._epoch_start: dict[str, Tensor] = {}  # random states that the order of this epoch came from

    # ---- what Lightning calls --------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a training on several devices before it begins; raises a UserError."""
        if trainer.world_size > 1:
            raise several_processes(trainer.world_size)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, or go on from a checkpoint; raises a UserError where the Trainer gives too little."""
        if len(trainer.optimizers) != 1:
            raise UserError(f"the module has {len(trainer.optimizers)} optimizers; growth needs exactly one")
        epochs = self._epochs or trainer.max_epochs
        if not epochs or epochs < 1:
            raise UserError(f"the Trainer's max_epochs is {epochs}; give it, or give epochs, from 1 on")
        if self.grower is not None:
            self.grower.close()  # of a run that was broken off
        loaders = trainer.fit_loop._combined_loader
        states = loaders._state_dicts()  # where Lightning put loaders that can be resumed
        self.grower = Grower(
            pl_module,
            trainer.optimizers[0],
            train=self._train if self._train is not None else trainer.train_dataloader,
            val=self._val if self._val is not None else trainer.val_dataloaders,
            epochs=epochs,
            step=self._step_function,
            **self._settings,
        )
        self._generators = GeneratorStates(pl_module.device, loaders.flattened)
        saved, self._saved = self._saved, {}
        if saved:
            self._resume(trainer, saved, states if len(states) == len(loaders.flattened) else [])
        else:
            self._first = trainer.current_epoch
            if trainer.current_epoch == 0 or trainer.fit_loop.is_resuming:  # else Lightning begins the epoch
                self._begin_epoch(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the random states from which the order of the data is drawn next."""
        if trainer.current_epoch != self._begun:
            self._epoch_start = self._generators.state_dict()

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Decide, if this is the validation at the end of a training epoch."""
        if not trainer.sanity_checking and trainer.is_last_batch:
            self._decide(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Decide, if no validation was there to do it at."""
        self._decide(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Decide every seed, and remove the hooks."""
        if self.grower is not None:
            self.grown = self.grower.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds; nothing before training has begun."""
        if self.grower is None:
            return self._saved
        return {
            **self.grower.state_dict(),
            **add_prefix("trainer", self._generators.state_dict()),
            **add_prefix("epoch_start", self._epoch_start),
            "first_epoch": torch.tensor(self._first),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint held until training begins."""
        self._saved = state_dict

    # ---- a checkpoint may fall on any step -------------------------------------------------------------

    def _resume(self, trainer: Any, saved: dict[str, Any], states: list[dict[str, Any]]) -> None:
        """Go on where a checkpoint was saved: inside an epoch, on its last step, or after it.

        states: of the loaders, if all of them can be resumed.
        """
        assert self.grower is not None
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        self.grower.load_state_dict(saved)
        self._first = int(saved.get("first_epoch", 0))
        now = strip_prefix("trainer", saved)
        done = 0 if trainer.is_last_batch else loop.batch_progress.current.ready  # batches of this epoch
        if done:
            self._epoch_start, self._begun = strip_prefix("epoch_start", saved), trainer.current_epoch
            self._generators.load_state_dict(self._epoch_start)
            trainer.fit_loop._combined_loader._load_state_dicts(states)
            iter(fetcher)
            # Other loaders begin the epoch anew: the same order is drawn, and what was read is skipped.
            for _ in range(0 if states else done):
                next(fetcher)
                fetcher.fetched -= 1  # Lightning adds the batches of this epoch itself
        self._generators.load_state_dict(now)
        if done:
            return
        if self.grower.epochs_done < trainer.current_epoch - self._first:
            self._finish_epoch(trainer)
        else:
            self._begin_epoch(trainer)

    def _begin_epoch(self, trainer: Any) -> None:
        """Draw the order of the epoch: Lightning drew it before the random numbers were put back."""
        self._epoch_start, self._begun = self._generators.state_dict(), trainer.current_epoch
        iter(trainer.fit_loop._data_fetcher)

    def _finish_epoch(self, trainer: Any) -> None:
        """Do what Lightning skips after a checkpoint of an epoch's last step: validate and decide.

        Afterwards Lightning begins the next epoch as in a run that was never stopped.
        """
        fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        fit.on_iteration_done()
        loop.on_iteration_done()
        loop.restarting = False
        fit.epoch_progress.current.completed -= 1  # for hooks and loggers it is still that epoch
        if loop._should_check_val_fx(fit._data_fetcher):
            trainer.validating = True
            loop.val_loop.run()
            trainer.training = True
        self._decide(trainer, trainer.lightning_module)
        for interval in ("step", "epoch"):
            loop.update_lr_schedulers(interval, update_plateau_schedulers=True)
        loop._batches_that_stepped += 1
        loop.batch_progress.increment_completed()
        fit.epoch_progress.current.completed += 1

    def _decide(self, trainer: Any, pl_module: Any) -> None:
        """Decide once after an epoch."""
        if self.grower is None or self.grower.done:  # growth may last for fewer epochs than training
            return
        if self.grower.epochs_done <= trainer.current_epoch - self._first:
            # Lightning clears the model's gradients before a validation and no checkpoint holds them: without
            # a validation they are set aside, so that a resumed run sees the same.
            gradients = [(parameter, parameter.grad) for parameter in pl_module.parameters()]
            pl_module.zero_grad()
            self.decisions.append(self.grower.step())
            for parameter, gradient in gradients:
                parameter.grad = gradient
