"""Values of `${oc.env:NAME}` in a run's config: they stay out of its logs."""

import os
import re

SHORTEST = 6  # characters of a secret; shorter values are numbers and switches

_hidden: dict[str, str] = {}


def hide(config: str) -> None:
    """From here on `hidden` also knows the variables that this text of a config names."""
    names = re.findall(r"oc\.env:\s*([^\s,}]+)", config)
    values = {name: os.environ.get(name, "") for name in names}
    _hidden.update({v: f"${{oc.env:{k}}}" for k, v in values.items() if len(v) >= SHORTEST})


def hidden(text: str) -> str:
    """The text with the names of variables in place of their values."""
    for value, name in _hidden.items():
        text = text.replace(value, name)
    return text
