"""Write the policy that a run trained into the package, with the conditions of its training.

    esper train --preset demo --out runs/rates     about two minutes of a core
    python -m studies.ship runs/rates rates        src/esper/pretrained/rates.safetensors

The file has what is needed to decide, the weights of the policy in half precision and the units of its value,
and nothing that training would need to go on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from esper.builders import LEARNER, agent_schema
from esper.controllers import AGENT_SETTINGS, SHIPPED, checkpoint_config, find_checkpoint
from esper.runs.checkpoints import load_checkpoint, save_checkpoint
from studies import command_line


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the last checkpoint of a run and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", help="the folder of a run of 'esper train'")
    parser.add_argument("name", help="of the controller")
    parser.add_argument("--to", type=Path, default=SHIPPED, help="the folder of the file")
    given = parser.parse_args(arguments)
    path = find_checkpoint(given.run)
    checkpoint = load_checkpoint(path)
    config = checkpoint_config(checkpoint, path)
    record = {
        "config": config.model_dump(mode="json", include=set(AGENT_SETTINGS)),
        "conditions": checkpoint.record["conditions"],
    }
    learned = {}
    for name, value in checkpoint.tensors.items():
        if name.startswith(f"{LEARNER}.policy."):
            learned[name] = value.to(torch.float16)
        elif name.startswith(f"{LEARNER}.value_normalizer."):
            learned[name] = value
    save_checkpoint(
        given.to / f"{given.name}.safetensors", learned, record, agent_schema(config.episode.rates)
    )


if __name__ == "__main__":
    command_line.run(main)
