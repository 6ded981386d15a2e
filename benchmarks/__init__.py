"""What things cost, measured against the shape they replace. `python -m benchmarks.hot_paths --help`."""
