"""Limits on the number of examples. Hypothesis's profile sets the number, see tests/conftest.py."""

from collections.abc import Iterable

from hypothesis import settings


def at_most(count):
    """Limits a test whose examples are slow to `count` of them, where the profile asks for more."""
    return settings(max_examples=min(count, settings().max_examples))


def slow_cases(cases: Iterable) -> list:
    """Returns all of these slow cases, or one in three with the fast profile."""
    return [*cases][:: 3 if settings().max_examples < 100 else 1]
