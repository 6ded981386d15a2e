"""What a run leaves behind: the run folder, metrics, events, checkpoints, pictures and the report.

Telemetry knows none of the other rooms. What reaches it are plain records (see `schema`) and tensors
by name (see `checkpoints`).
"""
