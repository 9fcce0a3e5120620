"""`verl-ext lab`: a mixture of experts small enough to collapse, and to be saved, on a laptop.

The lab has its own model and sampler, and the faults between the two. The plugin's and verl's own code measures,
weighs, filters, judges and trains.
"""
