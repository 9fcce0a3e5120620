"""The `stability` node: validated when built, parsed once.

`python -m verl_ext.settings > docs/settings.md` makes the page.
"""
