"""verl on CPU cores: development, tests and the quick start, on a machine without an accelerator."""
