"""verl on CPU cores: development, tests and the quick start, on a machine without an accelerator."""

import os


def requested() -> bool:
    """Whether verl is to run on CPU cores here: VERL_PLATFORM=cpu, verl's own switch."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"
