"""Readers of the files that a run left; `verl_ext.report.load` combines them."""
