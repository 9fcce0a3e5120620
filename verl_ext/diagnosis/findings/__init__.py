"""Findings from the metrics of a run: one file per subject, with small functions that `registry.finding` registers.

find_all(readings)["entropy_gone"]    Finding(level="gone", text="the entropy is 4% of what it was", step=31)
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
