"""Scripts that grow a model, each run as `python -m examples.NAME`."""
