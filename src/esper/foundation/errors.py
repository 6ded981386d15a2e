"""The one kind of error that is addressed to the person at the keyboard."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input or a bad place, told in one sentence: what was given, what is allowed, how to mend it."""
