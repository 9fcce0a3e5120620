"""verl's own validation of a config, without all that `import verl` brings along. Written for verl 0.9.1.

verl's settings classes are plain dataclasses, and `validate_config` builds and asks them. On the way to them stand
packages whose `__init__` imports torch, tensordict, transformers and Ray: seconds, for nothing that a setting is
checked by. `passes_quickly` imports the modules of the settings with those left out, and leaves none in `sys.modules`.
It only ever says that a config passes; whatever it stumbles over is validated again by verl as it is.
"""

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

from verl_ext.launch.installed import package_folder
from verl_ext.upstream.patching import Undo, patch, together

BARE = ("verl", "verl.utils", "verl.utils.profiler", "verl.utils.qat")  # packages without their __init__
# What the modules of the settings import at their top, and use to load models or tensors alone.
HOLLOW = {
    "torch": (),
    "torch.nn": ("Module",),
    "transformers": ("AutoConfig",),
    "verl.utils": ("hf_processor", "hf_tokenizer"),
    "verl.utils.model": ("get_generation_config", "update_model_config"),
}
ON_TOP = "verl_ext.workers.loss_config"  # a dataclass of ours on top of one of these
SETTINGS = {"verl.utils.profiler": ("config", "ProfilerConfig"), "verl.utils.qat": ("core", "QATConfig")}


def passes_quickly(config: Any, **roles: bool) -> bool:
    """Whether verl's `validate_config` takes a config; False also where only the whole of verl can tell, and where that
    is imported already."""
    if "verl" in sys.modules:
        return False
    try:
        with _settings_alone():
            importlib.import_module("verl.workers.config")
            importlib.import_module("verl.utils.config").validate_config(config, **roles)
    except Exception:  # of a config that verl refuses, or of something that was left out: verl as it is tells
        return False
    return True


@contextlib.contextmanager
def _settings_alone() -> Iterator[None]:
    folder = package_folder("verl")
    assert folder is not None
    ours = {name: types.ModuleType(name) for name in {*BARE, *HOLLOW} - {*sys.modules}}
    for name, module in ours.items():
        vars(module).update(dict.fromkeys(HOLLOW.get(name, ()), _LeftOut))
    for name in BARE:
        ours[name].__path__ = [str(folder.joinpath(*name.split(".")[1:]))]

    def stand_in(name: str) -> Undo:
        return patch("settings_alone", sys.modules, name, ours[name], new=True)

    undo = together(*(partial(stand_in, name) for name in ours))
    try:
        for name, (module_name, member) in SETTINGS.items():
            vars(ours[name])[member] = getattr(importlib.import_module(f"{name}.{module_name}"), member)
        yield
    finally:
        undo()
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl" or name == ON_TOP]:
            del sys.modules[name]


class _LeftOut:
    """Stands for a function or a class that no setting is checked by."""

    def __init__(self, *args: object, **kwargs: object):
        raise RuntimeError("left out of a quick validation")
