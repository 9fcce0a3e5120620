"""What a search tries: the product of the sweeps among its overrides, in Hydra's own notation of `--multirun`."""

import re
from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from verl_ext.errors import ConfigError

NO_SKIP = "stability.batch_skip.threshold"
MOST = 500


def candidates(overrides: Sequence[str], space: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(the candidates, by name their overrides, blank-separated; the overrides that sweep nothing, for all runs).

    Args:
        overrides: `KEY=A,B` and whatever else Hydra sweeps; without one of them, `space` is searched.

    Raises:
        ConfigError: Hydra cannot read an override, or there are too many candidates.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        if not any(each.is_sweep_override() for each in parsed):
            parsed = OverridesParser.create().parse_overrides([*space, *overrides])
        common = tuple(each.input_line or "" for each in parsed if not each.is_sweep_override())
        sweeps = [each for each in parsed if each.is_sweep_override()]
        [points] = BasicSweeper.split_arguments(sweeps, max_batch_size=None)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if len(points) > MOST:
        raise ConfigError(f"{len(points)} candidates; a search takes at most {MOST}", otherwise="sweep over less")
    return _named([sorted(point, key=_group_first) for point in points], common), common


def _group_first(override: str) -> bool:
    return not override.startswith("stability=")


def _named(points: Sequence[Sequence[str]], common: Sequence[str]) -> dict[str, str]:
    """By what their values say, so that a folder tells what ran in it."""
    skip = [] if any(NO_SKIP in each for each in (*common, *points[0])) else [f"{NO_SKIP}=null"]
    found: dict[str, str] = {}
    for point in points:
        name = "-".join(map(_word, point))
        found[f"{name}.{len(found)}" if name in found else name] = " ".join([*point, *skip])
    return found


def _word(override: str) -> str:
    """`stability=r3` is r3, `stability.correction=[icepop,geo_mask]` icepop+geo_mask, `stability.tis.high=3` high3."""
    key, _, value = override.partition("=")
    text = re.sub(r"[^\w.+-]+", "+", value).strip("+") or "null"
    return text if key.strip("+~") in ("stability", "stability.correction") else f"{key.rpartition('.')[2]}{text}"
