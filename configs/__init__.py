"""Hydra configs, installed as `verl_ext.configs`."""
