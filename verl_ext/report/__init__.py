"""Reports on runs from their metrics. In a notebook: `from verl_ext.report import compare, load_run`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_ext.report.notebook import compare, load_run

__all__ = ["compare", "load_run"]


def __getattr__(name: str) -> Any:
    """Imports the notebook's functions only when they are used: the command line must not wait for numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl_ext.report import notebook

    return getattr(notebook, name)
