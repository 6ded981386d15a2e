"""Esper: networks that grow while they train."""

__version__ = "0.1.0"
