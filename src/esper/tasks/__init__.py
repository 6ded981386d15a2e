"""Data sets that need no network, split once and for all."""
