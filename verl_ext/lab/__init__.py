"""`verl-ext lab`: a mixture of experts small enough to collapse, and to be saved, on a laptop.

The lab has its own model and sampler, and the faults between the two. Measuring, weighing, filtering, judging and
training use the plugin's and verl's own code.
"""
