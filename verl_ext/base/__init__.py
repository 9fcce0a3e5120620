"""Shared definitions: errors, methods, names of fields and metrics, and how foreign code is changed."""
