"""A callback that grows the model of a Trainer of Hugging Face's transformers.

    grower = TransformersGrower(val=eval_dataset)
    trainer = Trainer(model, args, train_dataset=train_dataset, eval_dataset=eval_dataset, callbacks=[grower])
    trainer.train()
    grower.grown           # the plain model, with what grew

Every checkpoint of the Trainer gets a file of the growth beside its own, and
`trainer.train(resume_from_checkpoint=...)` goes on to the same bits.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from esper.growing.api import several_processes
from esper.growing.criterion import UserStep
from esper.growing.grower import Grower
from esper.runs.files import write_atomically
from esper.utils.errors import UserError

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise UserError("transformers is not installed; pip install 'esper-lite[transformers]'") from error

FILE = "esper_growth.pt"


class TransformersGrower(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Grows the model that a Trainer trains; one decision after each epoch.

    val, train: data that seeds are measured and trained on: a data set, read in the Trainer's own batches, or
        a loader. `train` is the Trainer's own data set if left out.
    epochs: how long growth lasts; the Trainer's own epochs if left out.
    step: (model, batch) → loss, score. Without it a model gives its own loss, and the score is e^−loss.
    settings: those of `esper.Grower` (slots, controller, budget, blueprints, lr ...).

    `grown` is the plain model once training has ended; the Trainer's model then has the weights of its best
    epoch, without what grew.
    """

    def __init__(
        self,
        val: Any,
        train: Any = None,
        epochs: int | None = None,
        step: UserStep | None = None,
        **settings: Any,
    ):
        self.grower: Grower | None = None
        self.grown: nn.Module | None = None
        self.decisions: list[str] = []  # in words, epoch by epoch, of this process
        self._train, self._val, self._epochs, self._step_function = train, val, epochs, step
        self._settings = settings

    # ---- what the Trainer calls ------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        """Begin, or go on from the checkpoint that the Trainer goes on from."""
        if max(args.world_size, args.n_gpu) > 1:
            raise several_processes(max(args.world_size, args.n_gpu))
        loader, optimizer = trainer["train_dataloader"], trainer["optimizer"]
        if self.grower is not None:
            self.grower.close()  # of a run that was broken off
        train = loader.dataset if self._train is None else self._train
        self.grower = Grower(
            trainer["model"],
            getattr(optimizer, "optimizer", optimizer),  # accelerate's wrapper has no hooks
            train=_in_batches(train, args.train_batch_size, loader.collate_fn, args.seed),
            val=_in_batches(self._val, args.eval_batch_size, loader.collate_fn),
            epochs=self._epochs or max(1, math.ceil(state.num_train_epochs)),
            step=self._step_function,
            **self._settings,
        )
        if state.global_step > 0:
            self.grower.load_state_dict(_read(args, state.global_step))
            # A checkpoint of an epoch's last step is saved ahead of the decision after that epoch, and the
            # Trainer goes on with the next one.
            if self.grower.epochs_done < int(state.epoch):
                self._decide()

    def on_step_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        """Clear the gradients of seeds: the Trainer clears those of the model alone."""
        for parameter in self.grower.seed_parameters if self.grower is not None else ():
            parameter.grad = None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        """Decide once."""
        self._decide()

    def on_save(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        """Write the growth to the checkpoint that the Trainer saved."""
        assert self.grower is not None, "the Trainer begins before it saves"
        if state.is_world_process_zero:
            file = io.BytesIO()
            torch.save(self.grower.state_dict(), file)
            write_atomically(_folder(args, state.global_step) / FILE, file.getvalue())

    def on_train_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        """Decide every seed, and remove the hooks."""
        if self.grower is not None:
            self.grown = self.grower.finish()

    def _decide(self) -> None:
        assert self.grower is not None, "the Trainer begins before its epochs end"
        if not self.grower.done:  # growth may last for fewer epochs than training
            self.decisions.append(self.grower.step())


def _folder(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


def _read(args: Any, step: int) -> dict[str, Any]:
    """Read the growth from the checkpoint that the Trainer was given, or from that of this step."""
    given = args.resume_from_checkpoint
    folders = [Path(given)] if isinstance(given, str) else []
    files = [folder / FILE for folder in (*folders, _folder(args, step))]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise UserError(
            f"the Trainer goes on from step {step} and {files[-1]} is not there; take a checkpoint that "
            "was saved with this callback, in the same output_dir"
        )
    state: dict[str, Any] = torch.load(found, weights_only=True)
    return state


def _in_batches(data: Any, size: int, collate: Any, seed: int | None = None) -> Any:
    """Return a data set in the Trainer's batches, shuffled where a seed is given; a loader as it is."""
    if not isinstance(data, Dataset) and not hasattr(data, "__getitem__"):
        return data
    if seed is None or isinstance(data, IterableDataset):
        return DataLoader(data, size, collate_fn=collate)
    draw = torch.Generator().manual_seed(seed)
    return DataLoader(data, size, shuffle=True, generator=draw, collate_fn=collate)
