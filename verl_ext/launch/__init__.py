"""A config -> can it run? Composition, checks, sizes, models, GPUs. Never starts Ray."""
