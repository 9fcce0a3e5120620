"""Everything that a config can switch on, one file per feature.

A feature's file holds, in this order, what the feature needs of a run's processes, what it refuses, what it sets in
verl's config, and its lines of the start-up table, each with the proof that the running engines give for it. The needs
decide what runs; the table only prints. Its settings are in `settings`, below every feature. The code that does the
work is where it runs: in core, workers, routing and trainer. `table` lists the features; everything else loops over
that list.
"""
