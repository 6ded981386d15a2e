"""The learner on small worlds: `python -m examples.cartpole`, `examples.memory`, `examples.masked`."""
