"""Checks that the fix of an error works."""

from verl_ext.base.errors import ConfigError


def assert_fixed(error, run):
    """Checks an error's fix, if it has one: `run(*overrides)` with the fix appended ends with another error, or with
    none."""
    if error.fix:
        assert error_text(run, error.fix) != str(error)


def error_text(run, overrides):
    try:
        run(*overrides)
    except ConfigError as error:
        return str(error)
    return ""
