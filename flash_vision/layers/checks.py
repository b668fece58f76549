"""The checks of constructor arguments; every message names argument, constraint and value."""

from typing import Sequence, Tuple, Union


def check_choice(name: str, value: str, choices: Tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(repr(choice) for choice in choices)}; got {value!r}")


def check_positive(name: str, value: int) -> None:
    """Raise ValueError unless `value` is at least 1."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def positive_pair(name: str, value: Union[int, Sequence[int]]) -> Tuple[int, int]:
    """A side, or (height, width), as a pair of numbers of at least 1; ValueError otherwise."""
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"{name} must be a side of at least 1 or a pair of them, got {value}")
    return pair[0], pair[1]
