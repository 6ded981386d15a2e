"""The errors that are addressed to the person at the keyboard."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input or a bad place, told in one sentence: what was given, what is allowed, how to mend it."""


def one_line(error: Exception) -> str:
    """The first line of what an error of somebody else's code says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class ToldElsewhereError(UserError):
    """Bad input that another process tells the person about."""


class LostProcessError(RuntimeError):
    """Another process ended, or was waited for in vain."""
