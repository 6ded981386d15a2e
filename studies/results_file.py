"""What is kept of every arm: plain records, small enough to commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.lifecycle import Op, Stage
from esper.lifecycle.actions import NUM_BLUEPRINTS
from esper.population.data import MemberData  # noqa: F401
from esper.simic.compare import EVALUATION_EPISODE
from esper.simic.environment import GrowthEnvironment
from esper.simic.rewards import potential
from esper.simic.rollout import Doubles, EpisodeRecord, Floats, evaluate_test, play
from esper.tamiyo.controllers import Controller
from studies.setting import REWARD
