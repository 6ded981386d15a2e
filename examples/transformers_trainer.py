"""Grow into the model of a transformers Trainer: `python -m examples.transformers_trainer`.

Needs the extra: pip install 'esper-lite[transformers]'
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import esper
from esper.tasks import load_task


def main(steps: int = 300, samples: int | None = None, out: str = "runs/transformers") -> esper.Progressive:
    """Train; return the object that grew the model."""
    sizes = {"n_layer": 8, "n_head": 2, "n_embd": 32, "vocab_size": 97, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    windows = load_task("text").train.inputs[:samples]
    dataset = [{"input_ids": window, "labels": window} for window in windows]

    growth = esper.TransformersProgressive()
    arguments = TrainingArguments(
        out,
        max_steps=steps,
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
    )
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[growth])
    trainer.train()

    assert growth.grower is not None
    print(f"{growth.grower.active} blocks active after {growth.grower.steps_done} steps")
    return growth.grower


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
