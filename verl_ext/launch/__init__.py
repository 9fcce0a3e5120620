"""Composes a run's config and checks whether it can run: packages, sizes, models, GPUs. Never starts Ray."""
