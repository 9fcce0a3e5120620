"""The fix that an error carries, applied to a config to see whether the error goes away."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_ext.errors import UserError

ABSENT = object()


def applied(
    config: "DictConfig", error: "UserError", found: Callable[["DictConfig"], "UserError | None"]
) -> tuple["DictConfig", tuple[str, ...]]:
    """The config with an error's fix, and what of the fix was not so already; as it was, and (), where none helps.

    Args:
        found: the error that a config has; None where it has none.
    """
    from omegaconf import OmegaConf

    fixed, fix = copy.deepcopy(config), list[str]()
    for override in error.fix:
        key, _, _ = override.partition("=")
        value = OmegaConf.select(OmegaConf.from_dotlist([override]), key)
        if OmegaConf.select(config, key, default=ABSENT) in (ABSENT, value):  # what is not there is off already
            continue
        OmegaConf.update(fixed, key, value)
        fix.append(override)
    if not fix or str(found(fixed)) == str(error):
        return config, ()
    return fixed, tuple(fix)
