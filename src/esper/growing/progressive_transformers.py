"""Grow into the model of a transformers Trainer: `Trainer(..., callbacks=[TransformersProgressive()])`."""

from __future__ import annotations

from typing import Any

from esper.growing.progressive import PLAIN_CHECKPOINT, Progressive, end_training
from esper.utils.errors import UserError

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise UserError("transformers is not installed; pip install 'esper-lite[transformers]'") from error


class TransformersProgressive(TrainerCallback, ExportableState):  # type: ignore[misc,unused-ignore]
    """Grow into the model that a Trainer trains; `options` are those of `esper.Progressive`.

    The state is part of the Trainer's own, so that `trainer.train(resume_from_checkpoint=...)` goes on to the
    same bits. On several devices the Trainer needs `ddp_find_unused_parameters=True`.
    """

    def __init__(self, **options: Any) -> None:
        self.grower: Progressive | None = None
        self.options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        """Skip blocks, or go on from the checkpoint that the Trainer goes on from."""
        if args.parallel_mode.value == "distributed" and args.ddp_find_unused_parameters is not True:
            raise UserError("skipped blocks need ddp_find_unused_parameters=True in TrainingArguments")
        # The Trainer puts callbacks back only where it is told to, but always reads what they had saved.
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})
        if state.global_step and not saved:
            raise UserError(PLAIN_CHECKPOINT)
        options = {"scheduler": trainer.get("lr_scheduler"), **self.options}
        self.grower = Progressive(trainer["model"], trainer["optimizer"], state.max_steps, **options)
        if state.global_step:
            self.grower.load_state_dict(saved)

    def on_step_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        """Count a step of the optimizer, and grow where it is time."""
        assert self.grower is not None
        active = self.grower.active
        if self.grower.step() and self.grower.active > active:
            # In the best weights until now some blocks were not trained.
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None

    def on_train_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        """Activate all blocks where training ends before its time."""
        end_training(self.grower)

    def state(self) -> dict[str, Any]:
        """Return what the Trainer keeps in trainer_state.json, which holds plain values alone."""
        plain = {k: v for k, v in self.options.items() if isinstance(v, float | int | str | list | tuple)}
        kept = {k: v for k, v in plain.items() if k not in ("also", "example")}
        return {"args": kept, "attributes": {} if self.grower is None else self.grower.state_dict()}
