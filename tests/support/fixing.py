"""Checks that the fix of an error works."""

from verl_ext.base.errors import ConfigError


def assert_fixed(error, run):
    """Checks an error's fix, if it has one: `run(*overrides)` with the fix appended ends with another error, or with
    none."""
    if error.fix:
        assert said_by(run, error.fix) != str(error)


def said_by(run, overrides):
    try:
        run(*overrides)
    except ConfigError as error:
        return str(error)
    return ""
