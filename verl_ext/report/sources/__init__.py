"""Readers of what a run left on disk; `verl_ext.report.load` puts them together."""
