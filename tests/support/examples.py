"""How many examples are tried: hypothesis's profile says, see tests/conftest.py."""

from collections.abc import Iterable

from hypothesis import settings


def at_most(count):
    """For a test whose examples are slow: fewer than the profile asks for, where that asks for more."""
    return settings(max_examples=min(count, settings().max_examples))


def some(cases: Iterable) -> list:
    """For cases that are slow: one in three, where the profile is the fast one."""
    return [*cases][:: 3 if settings().max_examples < 100 else 1]
