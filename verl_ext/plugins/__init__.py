"""The plugins that verl and vLLM load in each of their processes, by the entry points of setup.py."""
