"""Readers of the forms in which a run is on disk; `verl_ext.report.load` combines them.

Each module of this package registers what it reads: a format of logs and documents (`text.register_format`), or a kind
of file or folder (`kinds.register_kind`). The order of detection, the help and the table of docs/report.md follow.
"""

from importlib import import_module
from pkgutil import iter_modules

from verl_ext.report.sources.kinds import KINDS
from verl_ext.report.sources.text import FORMATS

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["FORMATS", "KINDS", "form_rows"]


def form_rows() -> list[tuple[str, str, str]]:
    """Returns (title, example, remarks) of every form that is read: logs and documents first."""
    formats = sorted(FORMATS, key=lambda form: form.order)
    return [
        *((form.title, form.example, form.remarks) for form in formats),
        *((kind.title, kind.example, kind.remarks) for kind in KINDS),
    ]
