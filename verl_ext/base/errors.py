"""Errors that the user has to act on. The entry point prints them as one line instead of a stack trace."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from verl_ext.base.printable import one_line


class UserError(Exception):
    """An error of a setting or an input that cannot work. Its text is `MESSAGE; set FIX, or OTHERWISE`.

    Args:
        message: names the setting or input, and gives the reason.
        fix: Hydra overrides that together remove this error; () if none are known.
        otherwise: another remedy, in words.
        fallback: Hydra overrides that turn off the part that cannot work. If a preset asked for that part, they are
            applied instead of raising the error (`features.fit`). () if the user has to decide; None leaves it to
            `with_fallback`.
    """

    def __init__(
        self, message: str, fix: tuple[str, ...] = (), otherwise: str = "", fallback: tuple[str, ...] | None = None
    ) -> None:
        overrides = f"set {' and '.join(fix)}" if fix else ""
        remedy = ", or ".join(filter(None, (overrides, otherwise)))
        super().__init__(f"{message}; {remedy}" if remedy else message)  # only the text: Ray pickles by `args`
        self.fix, self.fallback, self.why = fix, fallback, message


class ConfigError(UserError, ValueError):
    """An error in the configuration, found before anything is started."""


class SettingError(ConfigError):
    """An error of a settings dataclass, without its place in the config, which `verl_ext.base.methods.build` adds.

    Args:
        name, said: the setting, and what is wrong with it; the text is `NAME SAID`.
        fix, otherwise: as in UserError; the fix lacks the place too.
    """

    def __init__(self, name: str, said: str = "", fix: tuple[str, ...] = (), otherwise: str = "") -> None:
        super().__init__(f"{name}{said}", fix, otherwise)
        self.name, self.said, self.otherwise = name, said, otherwise

    def at(self, where: str) -> ConfigError:
        """Returns the error that the user sees, each setting with its place."""
        return ConfigError(
            f"{where}.{self.name}{self.said}", tuple(f"{where}.{one}" for one in self.fix), self.otherwise
        )


@contextmanager
def with_fallback(*overrides: str) -> Iterator[None]:
    """Runs checks whose errors give way by these overrides, unless they name their own."""
    try:
        yield
    except UserError as error:
        if error.fallback is None:
            error.fallback = overrides
        raise


class HookError(UserError, RuntimeError):
    """The started engines do not run with the settings that the config asks for."""


class BatchError(UserError, ValueError):
    """A batch that the training step cannot use."""


class GuardStopError(UserError, RuntimeError):
    """The guard ended the run; the entry point exits with a separate code."""


class WorkerDiedError(UserError, RuntimeError):
    """A process of the run is gone."""


def print_error(command: str, error: Exception) -> int:
    """Prints an error as the last line of a `verl-ext` command; returns the exit code."""
    print(f"verl-ext {command}: {one_line(str(error))}", file=sys.stderr)
    return 2


def require_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{setting}={value} is not known; choose one of: {', '.join(choices)}")
