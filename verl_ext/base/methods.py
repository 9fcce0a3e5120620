"""Methods that users name: a function, the dataclass of its settings, and the traits of its kind.

The decorator of its kind (`register_correction`, `register_batch_filter`, `register_estimator`) adds a method to the
kind's registry, where it is looked up by name. A function takes its settings as keyword arguments. Settings can be read
without torch (`verl_ext.core`).
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Any, Generic, NoReturn, TypeVar, get_args, get_type_hints

from verl_ext.base.errors import ConfigError, Problem, Problems, SettingError, require_choice

OF_YOUR_OWN = "name the module that registers your own in stability.plugins (verl-ext lab: --plugins)"
Rule = tuple[Callable[[Any], bool], str]  # whether a setting may have a value, and the rule in words
ABOVE_0: Rule = (lambda value: value > 0, "must be above 0")
SHARE: Rule = (lambda value: 0 < value < 1, "must be between 0 and 1")
KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Method:
    """`function(*data, **settings)`, known by `name`; `settings` is the dataclass that checks them."""

    name: str
    function: Callable[..., Any]
    settings: type


M = TypeVar("M", bound=Method)


class Registry(dict[str, M]):
    """The methods of one kind by name."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def add(self, method: M) -> None:
        """Adds a method; a function that is there already, because its module is imported again, is replaced."""
        known, new = self.get(method.name), method.function
        if known and (known.function.__module__, known.function.__qualname__) != (new.__module__, new.__qualname__):
            raise ConfigError(f"a {self.kind} named {method.name} is registered already")
        self[method.name] = method


@dataclass(frozen=True)
class ConfiguredMethod(Generic[M]):
    """A method with its validated settings, as a run uses it; `str` gives a line of the start-up table."""

    method: M
    settings: Any

    @property
    def name(self) -> str:
        return self.method.name

    def __str__(self) -> str:
        return described(self.name, asdict(self.settings))


def described(name: str, settings: Mapping[str, Any]) -> str:
    """Returns text such as `icepop, alpha 0.5, beta 5`."""
    return ", ".join([name, *(f"{key} {_shown(value)}" for key, value in settings.items())])


def choose(method: M, given: Mapping[str, Any] | None, where: str) -> ConfiguredMethod[M]:
    """Returns the method with the settings given, which are at `where` in the config; raises as `build` does."""
    return ConfiguredMethod(method, build(method.settings, given, where))


def settings_of(function: Callable[..., Any], *besides: str, rules: Mapping[str, Rule] | None = None) -> type:
    """Builds the settings dataclass of a function that has none: its keyword-only arguments, with types and defaults.

    Args:
        besides: keyword-only arguments that are not settings.
        rules: what must hold of the values (`require_rules`).
    """
    arguments = inspect.signature(function).parameters.values()
    kept = [one for one in arguments if one.kind is one.KEYWORD_ONLY and one.name not in besides]
    return make_dataclass(
        "".join(part.title() for part in function.__name__.split("_")),
        [(argument.name, _kind(argument.annotation), _default(argument.default)) for argument in kept],
        namespace={"__post_init__": lambda settings: require_rules(settings, rules or {})},
        frozen=True,
        kw_only=True,
    )


def _kind(annotation: Any) -> Any:
    return annotation if annotation in KINDS else Any


def _default(value: Any) -> Field:
    return field() if value is inspect.Parameter.empty else field(default_factory=lambda: value)


def defaults(kind: type) -> dict[str, Any]:
    """Returns name -> default of each setting, nested dataclasses included; None for a setting that must be given."""
    found: dict[str, Any] = {}
    for one in fields(kind):
        value = one.default if one.default_factory is MISSING else one.default_factory()
        nested = is_dataclass(value) and not isinstance(value, type)
        found[one.name] = asdict(value) if nested else None if value is MISSING else value  # type: ignore[arg-type]
    return found


def build(kind: type, given: Mapping[str, Any] | None, where: str) -> Any:
    """Builds the dataclass `kind` from the settings given, nested ones included.

    Raises:
        ConfigError: settings are not known, missing, of another type, or refused by the dataclass; it names them by
            their place in the config, `where`. A field may give a value to try in its metadata, under "for example".
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given} must be a mapping of its settings, {{}} for none")
    hints = get_type_hints(kind)
    require_known(given or {}, hints, where)
    values, problems = dict[str, Any](), Problems()
    for one in fields(kind):
        value, place = (given or {}).get(one.name), f"{where}.{one.name}"
        with problems:
            if one.default is MISSING and one.default_factory is MISSING and value is None:
                _raise_missing(one, place)
            if one.name in (given or {}):
                values[one.name] = _built(hints[one.name], value, place)
    problems.raise_any()
    try:
        return kind(**values)
    except SettingError as error:
        raise error.at(where) from error
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{where}: {error}") from error


def require_method(setting: str, name: str, known: Iterable[str]) -> None:
    require_choice(setting, name, tuple(known), OF_YOUR_OWN)


def require_known(given: Iterable[str], known: Collection[str], where: str, otherwise: str = "") -> None:
    """Raises ConfigError for the unknown settings given at `where`; the error lists similar names.

    Args:
        otherwise: the remedy if no name is similar; by default the list of all known names.
    """
    unknown = list[Problem]()
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3)
            choices = f"similar names: {', '.join(near)}" if near else otherwise
            choices = choices or f"its settings are: {', '.join(known) or 'none'}"
            unknown.append(Problem(f"{where}.{name} is not known", choices))
    if unknown:
        raise ConfigError.of(unknown)


def _built(hint: Any, value: Any, setting: str) -> Any:
    """Returns a value of this type: a dataclass, None or a dataclass, or a value that OmegaConf converts."""
    if is_dataclass(hint):
        return build(hint, value, setting)  # type: ignore[arg-type]
    if kinds := [kind for kind in get_args(hint) if is_dataclass(kind)]:
        return None if value is None else build(kinds[0], value, setting)  # type: ignore[arg-type]
    return _converted(hint, value, setting)


def _converted(hint: Any, value: Any, setting: str) -> Any:
    """Converts a value to the dataclass's type with OmegaConf, as verl's own settings are converted."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.merge(_schema(hint), {"value": value}))["value"]
    except OmegaConfBaseException as error:
        kinds = [words for one, words in KINDS.items() if hint in (one, one | None)]
        raise ConfigError(f"{setting}={value} must be {kinds[0] if kinds else f'of type {hint}'}") from error


@cache
def _schema(hint: Any) -> Any:
    """Returns a config of one setting of this type, for OmegaConf."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(make_dataclass("Setting", [("value", hint)]))


def _raise_missing(one: Field, setting: str) -> NoReturn:
    example = one.metadata.get("for example")
    fix = () if example is None else (f"{setting}={example}",)
    raise ConfigError(f"{setting} must be given: it has no default", fix, "another value" if fix else "")


def require(settings: Any, name: str, holds: bool, rule: str, **remedy: Any) -> None:
    """Raises SettingError, `name=value rule`, unless it holds; for a `__post_init__`. `remedy` is passed to the
    error."""
    if not holds:
        raise SettingError(name, f"={_shown(getattr(settings, name))} {rule}", **remedy)


def require_rules(settings: Any, rules: Mapping[str, Rule]) -> None:
    """Requires the rule of each setting, by name; for a `__post_init__`."""
    for name, (holds, rule) in rules.items():
        require(settings, name, holds(getattr(settings, name)), rule)


def require_one_of(settings: Any, name: str, choices: tuple[str, ...]) -> None:
    require_rules(settings, {name: one_of(*choices)})


def at_least(least: int) -> Rule:
    return lambda value: value >= least, f"must be at least {least}"


def one_of(*choices: str) -> Rule:
    return lambda value: value in choices, f"is not known; choose one of: {', '.join(choices)}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
