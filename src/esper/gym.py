"""Importing this module makes the environment of growing networks known to Gymnasium.

    import esper.gym
    import gymnasium

    envs = gymnasium.make_vec("esper/Growth-v0", num_envs=8, task="spirals", steps=20)

It is not imported by `import esper`, and it imports no more than Gymnasium: torch comes when an environment
is made.
"""

from __future__ import annotations

import gymnasium

ENVIRONMENT_ID = "esper/Growth-v0"

if ENVIRONMENT_ID not in gymnasium.registry:
    gymnasium.register(
        id=ENVIRONMENT_ID,
        entry_point="esper.simic.growth_env:GrowthEnv",
        vector_entry_point="esper.simic.growth_env:GrowthVectorEnv",
    )
