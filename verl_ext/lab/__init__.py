"""`verl-ext lab`: a mixture of experts small enough to collapse, and be saved, on a laptop.

The model, its sampler and what is wrong between the two are the lab's; what measures, weighs, filters, judges and
trains is the plugin's and verl's own code.
"""
