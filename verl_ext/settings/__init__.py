"""The `stability` node: validated when built, parsed once."""
