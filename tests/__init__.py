"""unit/ mirrors verl_ext/, stack/ starts the real thing, support/ is what both share."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the repository
