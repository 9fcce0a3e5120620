"""How many examples hypothesis tries: the profile says, see tests/conftest.py."""

from hypothesis import settings


def at_most(count):
    """For a test whose examples are slow: fewer than the profile asks for, where that asks for more."""
    return settings(max_examples=min(count, settings().max_examples))
