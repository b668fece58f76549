"""The one check of named options."""

from typing import Tuple


def check_choice(name: str, value: str, choices: Tuple[str, ...]) -> None:
    """Raise ValueError, naming argument, choices and value, unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(repr(choice) for choice in choices)}; got {value!r}")
