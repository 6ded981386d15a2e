"""The run folder, events, sinks and the report. Knows nothing of growth."""
