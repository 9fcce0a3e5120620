"""Everything that a config can switch on, one file per feature.

A feature's file has, in this order: what the feature needs of a run's processes, which settings it refuses, what it
sets in verl's config, and its lines of the start-up table, with the proof from the running engines. The needs decide
what runs; the table only prints. All settings are in `settings`. The code that does the work is in core, workers,
routing and trainer. `table` lists the features; everything else loops over that list.
"""
