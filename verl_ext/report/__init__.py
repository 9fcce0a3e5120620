"""A table and a figure from the metrics of one run."""
