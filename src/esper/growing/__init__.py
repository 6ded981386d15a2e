"""Grow a network of your own: `esper.grow(model, train=..., val=...)`."""
