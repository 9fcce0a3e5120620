"""Changes to verl's and vLLM's code, one file per thing changed.

changes.py   all of them in one table: what, why, when, for which versions; docs/upstream.md is made of it
patching.py  how they are made, here and in other rooms: `patch` an attribute, `wrap` a method, each with an undo
"""
