"""Checks of errors, and that their fix works."""

import pytest

from verl_ext.base.errors import ConfigError


def assert_refused(run, *said):
    """Checks that `run()` ends with one line for each problem, that `said` is in them, and that the fix works.

    Returns the error.
    """
    with pytest.raises(ConfigError) as error:
        run()
    for one in said:
        assert one in str(error.value)
    assert not any("\n" in str(problem) for problem in error.value.problems)
    assert_fixed(error.value, run)
    return error.value


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
