"""What the fix of an error does."""

from verl_ext.base.errors import ConfigError


def assert_fixed(error, run):
    """Where an error has a fix: `run(*overrides)` with it behind the others ends with another error, or with none."""
    if error.fix:
        assert said_by(run, error.fix) != str(error)


def said_by(run, overrides):
    try:
        run(*overrides)
    except ConfigError as error:
        return str(error)
    return ""
