"""The errors that are addressed to the person at the keyboard."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input or a bad place, told in one sentence: what was given, what is allowed, how to mend it."""


class ToldElsewhereError(UserError):
    """Bad input that another process tells the person about."""


class LostProcessError(RuntimeError):
    """Another process ended, or was waited for in vain."""
