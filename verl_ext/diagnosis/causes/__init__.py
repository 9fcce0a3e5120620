"""The causes of a run's problems, one TOML file each. The report, the guard, `verl-ext probe` and `verl-ext doctor` use
their texts.

A file gives, for its cause, how often each level of a finding is seen, as a word (`WORDS`). docs/extend.md shows a
file, and how a package adds its own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module, metadata
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verl_ext.base.errors import UserError
from verl_ext.diagnosis.findings.probe import FP32, PROBE_SHOWS
from verl_ext.diagnosis.findings.registry import RULES
from verl_ext.diagnosis.names import tomllib

FOLDER = Path(__file__).parent
ENTRY_POINTS = "verl_ext.causes"  # each names a package; its *.toml are causes, and it may register findings
WORDS = {"always": 3.0, "often": 1.5, "sometimes": 0.0, "rarely": -1.5, "never": -4.0}  # points
SUBJECTS = ("gap", "learning", "run")
LEAST = 3.0  # points from which a cause is named
APART = 2.0  # points by which two causes must differ in some level of a finding, unless they are listed as alike


class CauseError(UserError, ValueError):
    """The file of a cause cannot be used; the message is one line and names the file."""


@dataclass(frozen=True)
class Cause:
    """Something that can be wrong with a run.

    Attributes:
        name: the name of its file.
        title: what is wrong, a sentence without the full stop.
        about: "gap" if it makes the engines differ, "learning" if it concerns the learning itself, else "run".
        check: the one thing to look at.
        override: what to try, as overrides of `python -m verl_ext.main_ppo`; "" if no setting helps.
        moe_override: what to try in a mixture of experts; "" if that is `override` too.
        why: what the override does, a clause.
        doctor: the doctor's checks that find it in the settings of a launch.
        harmless_if_close: whether it is rounding, which is no fault while the gap is as small as in sound runs.
        a_correction_helps: whether a correction of the importance weights, or replay, makes the run sound again.
        only_with: levels of findings, as `finding.level`; the cause is named only if one of them is seen. () if any
            evidence may name it.
        explains: levels of findings, as `finding.level`, that follow from it: if it has LEAST points, they are no
            evidence for other causes.
        alike: causes that no finding can separate from it.
        elsewhere: trainer, as in names.toml -> its own setting to try; or level of a finding, as `finding.level` -> the
            settings of trainers to try instead if it is seen.
        check_if: level of a finding, as `finding.level` -> what to look at instead of `check` if it is seen.
        shows: finding -> level -> a word of WORDS.
    """

    name: str
    title: str
    about: str
    check: str
    override: str = ""
    moe_override: str = ""
    why: str = ""
    doctor: tuple[str, ...] = ()
    harmless_if_close: bool = False
    a_correction_helps: bool = False
    only_with: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    elsewhere: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    check_if: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    shows: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    @property
    def of_gap(self) -> bool:
        return self.about == "gap"

    @property
    def probe(self) -> tuple[str, ...]:
        """What the probe may show of it, of PROBE_SHOWS; () if the probe cannot find it."""
        return tuple(mark for mark in PROBE_SHOWS if self.points(*mark.split(".")) > 0)

    def override_for(self, moe: bool) -> str:
        """Returns what to try in a dense model, or in a mixture of experts."""
        return (self.moe_override if moe else "") or self.override

    def advice_for(self, moe: bool) -> str:
        """Returns the check for this cause, and the override to try."""
        override = self.override_for(moe)
        return f"check {self.check}" + (f"; try {override}" if override else "")

    def seen_with(self, marks: Collection[str]) -> "Cause":
        """Returns the cause with the check and the settings for these levels of findings."""
        check = next((check for mark, check in self.check_if.items() if mark in marks), self.check)
        settings = next((settings for mark, settings in self.elsewhere.items() if mark in marks), self.elsewhere)
        return replace(self, check=check, elsewhere=settings)

    def points(self, finding: str, level: str) -> float:
        """Returns the points of a level for this cause; 0 for a level that the cause does not list."""
        return WORDS[self.shows.get(finding, {}).get(level, "sometimes")]


# Key in a file -> its type, and the field of Cause that it becomes.
KEYS: dict[str, tuple[Any, str]] = {
    **{key: (str, key) for key in ("title", "about", "check", "why")},
    "try": (str, "override"),
    "try_moe": (str, "moe_override"),
    **{key: (list, key) for key in ("doctor", "only_with", "explains", "alike")},
    **{key: (bool, key) for key in ("harmless_if_close", "a_correction_helps")},
}
TYPES = {str: "a text", list: "a list of texts", bool: "true or false"}


def read_cause(file: Path) -> Cause:
    """Reads the file of a cause; the file's name is the cause's.

    Raises:
        CauseError: the file cannot be read, a key is missing, unknown or of another type, or a finding, level or word
            is unknown.
    """
    try:
        return _cause_of(file.stem, tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, CauseError) as error:
        raise CauseError(f"{file}: {error}") from None


def _cause_of(name: str, entry: dict[str, Any]) -> Cause:
    shows, texts = entry.pop("shows", {}), {key: entry.pop(key, {}) for key in ("elsewhere", "check_if")}
    for key, table in texts.items():
        if not _is_of_texts(table, by_mark=key == "elsewhere"):
            raise CauseError(f"{key} must be a table of texts")
    given = dict(_field(key, value) for key, value in entry.items())
    for key in ("title", "about", "check"):
        if not given.get(key):
            raise CauseError(f"{key} is missing")
    _check_shows(shows)
    cause = Cause(name, shows=shows, **texts, **given)
    if cause.about not in SUBJECTS:
        raise CauseError(f"about is {cause.about!r}; it must be one of {', '.join(SUBJECTS)}")
    known_marks = {f"{rule.name}.{level}" for rule in RULES.values() for level in rule.levels}
    marked = {
        "only_with": cause.only_with,
        "explains": cause.explains,
        "check_if": tuple(cause.check_if),
        "elsewhere": tuple(mark for mark, each in cause.elsewhere.items() if not isinstance(each, str)),
    }
    for key, marks in marked.items():
        if strange := [mark for mark in marks if mark not in known_marks]:
            raise CauseError(f"{key} lists {strange[0]}, which is no finding.level")
    if _most_points(cause) < LEAST:
        raise CauseError(f"no findings give this cause {LEAST:g} points, so it can never be named")
    return cause


def _is_of_texts(table: Any, *, by_mark: bool) -> bool:
    return isinstance(table, dict) and all(
        isinstance(each, str) or (by_mark and _is_of_texts(each, by_mark=False)) for each in table.values()
    )


def _field(key: str, value: Any) -> tuple[str, Any]:
    """Returns the name and the value of the field of Cause that an entry of a file becomes."""
    if key not in KEYS:
        raise CauseError(f"{key} is unknown; known are {', '.join(KEYS)}, [shows]")
    kind, name = KEYS[key]
    if not isinstance(value, kind) or (kind is list and not all(isinstance(each, str) for each in value)):
        raise CauseError(f"{key} must be {TYPES[kind]}")
    if kind is str and "\n" in value:
        raise CauseError(f"{key} must be one line")
    return name, tuple(value) if kind is list else value


def _check_shows(shows: Any) -> None:
    if not isinstance(shows, dict):
        raise CauseError("shows must be a table, finding = { level = word }")
    for name, levels in shows.items():
        if name not in RULES:
            raise CauseError(f"{name} is no finding; known are {', '.join(RULES)}")
        if not isinstance(levels, dict) or not levels:
            raise CauseError(f"{name} must be a table, {{ level = word }}")
        for level, word in levels.items():
            if level not in RULES[name].levels:
                raise CauseError(f"{level} is no level of {name}; known are {', '.join(RULES[name].levels)}")
            if not isinstance(word, str) or word not in WORDS:
                raise CauseError(f"{name}.{level} is {word!r}; known words are {', '.join(WORDS)}")


def _most_points(cause: Cause) -> float:
    best: dict[str, float] = {}
    for name, levels in cause.shows.items():
        family = RULES[name].family
        best[family] = max(best.get(family, 0.0), *(WORDS[word] for word in levels.values()))
    return sum(best.values())


def check_apart(causes: Sequence[Cause]) -> None:
    """Raises CauseError if two causes differ by less than APART points in every level, and neither lists the other as
    alike."""
    for one, other in combinations(causes, 2):
        if other.name in one.alike or one.name in other.alike:
            continue
        levels = {(name, level) for each in (one, other) for name, levels in each.shows.items() for level in levels}
        if not any(abs(one.points(*level) - other.points(*level)) >= APART for level in levels):
            raise CauseError(
                f"causes {one.name} and {other.name}: no finding tells them apart by {APART:g} points; list one as "
                "alike in the other's file, or say where they differ"
            )


def _read_all(files: Iterable[Path], known: Mapping[str, Cause] = MappingProxyType({})) -> Mapping[str, Cause]:
    found = dict(known)
    for file in files:
        cause = read_cause(file)
        if cause.name in found:
            raise CauseError(f"{file}: a cause {cause.name} exists already; give the file another name")
        found[cause.name] = cause
    for cause in found.values():
        if strange := [name for name in cause.alike if name not in found]:
            raise CauseError(f"cause {cause.name}: alike lists {strange[0]}, which is no cause")
    check_apart(list(found.values()))
    return MappingProxyType(found)


CAUSES = _read_all(sorted(FOLDER.glob("*.toml")))  # ours


@cache
def known_causes(files: tuple[Path, ...] = ()) -> Mapping[str, Cause]:
    """Returns all causes by name: ours, those of installed packages, and those of these files.

    Raises:
        CauseError: a file cannot be used, a name is taken, or two causes cannot be told apart.
    """
    return _read_all((*_installed_causes(), *files), CAUSES)


def _installed_causes() -> Iterable[Path]:
    """Yields the files of the packages that an entry point names; importing one registers its findings."""
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            package = import_module(point.value)
        except Exception as error:  # a broken package must be named, whatever it raises
            raise CauseError(f"the entry point {point.name} of {ENTRY_POINTS} cannot be imported: {error}") from error
        for folder in getattr(package, "__path__", ()):
            yield from sorted(Path(folder).glob("*.toml"))


@dataclass(frozen=True)
class Settling:
    """A command that decides between causes, with the overrides of the launch; `shows` is a clause with its result for
    each cause."""

    command: str
    shows: str

    @property
    def sentence(self) -> str:
        return f"`{self.command}` with the overrides of the launch {self.shows}"


def settling_of(first: Cause, second: Cause | None = None) -> Settling | None:
    """Returns the command that decides between two causes; None if no command does.

    The probe decides if the two have no reading in common; otherwise the doctor does, if one of its checks finds one of
    them.
    """
    others = second.probe if second is not None else ()
    if first.probe and not set(first.probe) & set(others):
        readable = [cause for cause in (first, second) if cause is not None and cause.probe]
        sweeps = any(mark.startswith(FP32) for cause in readable for mark in cause.probe)
        shown = [f'{_words(cause)} if it is "{cause.title}"' for cause in readable]
        return Settling("verl-ext probe --sweep fp32" if sweeps else "verl-ext probe", f"shows {'; '.join(shown)}")
    if checks := [check for cause in (first, second) if cause is not None for check in cause.doctor]:
        named = " and ".join(f'"{check}"' for check in checks)
        return Settling("verl-ext doctor", f"shows it in its row {named}")
    return None


def _words(cause: Cause) -> str:
    return ", or ".join(PROBE_SHOWS[mark] for mark in cause.probe)
