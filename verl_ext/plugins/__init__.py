"""The plugins that verl and vLLM load in each of their processes, through the entry points of setup.py."""
