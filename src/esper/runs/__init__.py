"""What a run leaves behind: the run folder, metrics, events, trajectories and checkpoints.

This package knows none of the others but `utils`. What reaches it are plain records (see `schema`) and
tensors by name (see `checkpoints`).
"""
