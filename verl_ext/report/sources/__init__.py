"""Readers of the files that a run left; `verl_ext.report.load` combines them."""

from importlib import import_module

from verl_ext.report.sources.text import FORMATS

# The formats of logs and documents. The last one is tried first, so what takes any text with numbers is the first.
for _name in ("pairs", "printed_dicts", "verl_console", "trainer_state", "notebook"):
    import_module(f"{__name__}.{_name}")

__all__ = ["FORMATS"]
