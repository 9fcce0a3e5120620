"""Hydra overrides made from values that anybody may have written."""

import re

# Text that Hydra's override grammar (hydra/grammar/OverrideLexer.g4, 1.3) reads as a string without quotes; a name of
# letters can also be one of its constants.
PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_/.-]*")
CONSTANTS = ("null", "true", "false", "inf", "nan")


def override(key: str, value: str) -> str:
    """`key=value` that Hydra reads back as this very string: no list, number, null, function or sweep.

    OmegaConf comes after Hydra, and takes `${...}` for an interpolation in quotes too. No spelling of it lasts: verl
    resolves its config in place, which undoes an escape, and reads it again. Refuse such a value before.
    """
    if PLAIN.fullmatch(value) and value.lower() not in CONSTANTS:
        return f"{key}={value}"
    # Backslashes count before a quote, and nowhere else.
    quoted = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"{key}='{quoted}'"
