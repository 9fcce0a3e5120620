"""Problems of a launch, and the errors that the user has to act on, which end a command as one line each."""

import errno
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from verl_ext.base.printable import one_line

LEVELS = ("error", "warning", "note", "ok")  # worst first
# What to do about a file or folder that the system refuses.
REMEDIES = {
    errno.EACCES: "change its permissions, or name another place",
    errno.EPERM: "change its permissions, or name another place",
    errno.EROFS: "name another place",
    errno.ENOTDIR: "name another place: this one is not in a folder",
    errno.EEXIST: "name another place: a file has this name",
    errno.ENOSPC: "free some space, or name another place",
    errno.EDQUOT: "free some space, or name another place",
}

# Modules that an environment may lack -> how to get them. `pip install --no-deps` leaves out the first, which are
# requirements, and pandas, which only a notebook's tables need.
REQUIRED = {
    **dict.fromkeys(
        ("altair", "vl_convert", "jinja2", "PIL", "scipy", "orjson", "tree_sitter", "tree_sitter_bash", "wrapt"),
        "pip install . in the clone of verl_ext",
    ),
    "pandas": "pip install pandas",
}
TRAINING = dict.fromkeys(
    ("torch", "tensordict", "ray", "transformers", "verl"), "docs/install.md, or on CPU cores tools/setup_cpu.sh"
)


@dataclass(frozen=True)
class Problem:
    """What a rule finds in a launch. Rules yield problems; the launch, the fit of a preset and the doctor read them.

    Attributes:
        found: the setting, version or file, its value, and what is wrong with it.
        why: why it matters, as a clause; "" if `found` says it.
        fix: Hydra overrides that together remove the problem; () if none are known.
        otherwise: another remedy, in words.
        leave_out: Hydra overrides that turn off the part that cannot work. If a preset asked for that part, they are
            applied (`features.fit`); () if the user has to decide.
        level: `error`, the run cannot work; `warning`, it can go wrong silently; `note`, worth knowing; `ok`, checked,
            and nothing is wrong.
        check: the name of the doctor's check that found it.
        unknown: settings that the rule read and whose values are not known; None if its reads were not recorded
            (`features.verl_config.judged`).
    """

    found: str
    why: str = ""
    fix: tuple[str, ...] = ()
    otherwise: str = ""
    leave_out: tuple[str, ...] = ()
    level: str = "error"
    check: str = ""
    unknown: tuple[str, ...] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """`FOUND; WHY; set FIX, or OTHERWISE`"""
        overrides = f"set {' and '.join(self.fix)}" if self.fix else ""
        return "; ".join(filter(None, (self.found, self.why, ", or ".join(filter(None, (overrides, self.otherwise))))))


class UserError(Exception):
    """An error of a setting or an input that cannot work. Its text is `MESSAGE; set FIX, or OTHERWISE`.

    Args:
        message, fix, otherwise, leave_out: of the problem, as in `Problem`.
    """

    def __init__(
        self, message: str, fix: tuple[str, ...] = (), otherwise: str = "", leave_out: tuple[str, ...] = ()
    ) -> None:
        self.problems: tuple[Problem, ...] = (Problem(message, "", fix, otherwise, leave_out),)
        super().__init__(str(self.problems[0]))  # only the text: Ray pickles by `args`

    @property
    def fix(self) -> tuple[str, ...]:
        """The overrides that remove all of its problems."""
        return tuple(dict.fromkeys(override for problem in self.problems for override in problem.fix))


class ConfigError(UserError, ValueError):
    """An error in the configuration, found before anything is started."""

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> "ConfigError":
        """Returns one error of several problems, a line each."""
        error = cls("")
        error.problems = tuple(problems)
        error.args = ("\n".join(map(str, error.problems)),)
        return error


class Problems:
    """Collects problems, also those of a `with` block that ends with a UserError.

    Several settings that are read one by one can so be refused together.
    """

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if not isinstance(error, UserError):
            return False
        self.found += error.problems
        return True

    def raise_any(self) -> None:
        """Raises a ConfigError of all problems that were collected."""
        if self.found:
            raise ConfigError.of(self.found)


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


class HookError(UserError, RuntimeError):
    """The started engines do not run with the settings that the config asks for."""


class BatchError(UserError, ValueError):
    """A batch that the training step cannot use."""


class MethodError(UserError, ValueError):
    """A result of a method, such as a correction of the user's own, that cannot be used."""


class GuardStopError(UserError, RuntimeError):
    """The guard ended the run; the entry point exits with a separate code."""


class WorkerDiedError(UserError, RuntimeError):
    """A process of the run is gone."""


def errors_of(problems: Iterable[Problem]) -> list[Problem]:
    """Returns the problems with which a run cannot work."""
    return [problem for problem in problems if problem.level == "error"]


def reason_of(error: Exception) -> str:
    """Returns what the cause of an error says, in one line without the name of its class."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split()) or type(cause).__name__


def file_error_text(error: OSError) -> str:
    """Returns `FILE: REASON; REMEDY`."""
    if error.strerror is None:  # made by a library, from a text
        return str(error)
    remedy = REMEDIES.get(error.errno or 0)
    return f"{error.filename or 'the output'}: {error.strerror}" + (f"; {remedy}" if remedy else "")


def print_error(command: str, error: Exception) -> int:
    """Prints an error as the last lines of a `verl-ext` command, one for each problem; returns the exit code."""
    said = file_error_text(error) if isinstance(error, OSError) else error
    for problem in error.problems if isinstance(error, UserError) else (said,):
        print(f"{f'verl-ext {command}'.rstrip()}: {one_line(str(problem))}", file=sys.stderr)
    return 2


def require_choice(setting: str, value: str, choices: tuple[str, ...], otherwise: str = "") -> None:
    if value not in choices:
        raise ConfigError(f"{setting}={value} is not known; choose one of: {', '.join(choices)}", otherwise=otherwise)


def missing_package(error: ModuleNotFoundError) -> str:
    """Returns how to get the package that a command needs. Raises the error again for any other module."""
    if (remedy := {**REQUIRED, **TRAINING}.get(error.name or "")) is None:
        raise error
    return f"{error.name} is not installed, and this needs it: {remedy}"
