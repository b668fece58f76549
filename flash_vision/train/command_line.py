"""The command line of a tool, from the dataclass that configures it. A user's mistake ends as one line, exit code 2."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from jsonargparse import ArgumentParser

from flash_vision.train.config import option_names

EXIT_USAGE = 2

Config = TypeVar("Config")


class _OneLineParser(ArgumentParser):
    """jsonargparse's parser with one line on stderr where the original prints usage, a tip and a nested message."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        print(f"{self.prog}: error: {_one_line(message)}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def run_tool(
    tool: Callable[[Config], None],
    config_class: Callable[..., Config],
    *,
    description: str | None,
    positional: str = "",
    argv: Sequence[str] | None = None,
) -> int:
    """Parses the command line into `config_class` and calls `tool` with it.

    Args:
        tool: what the command does, given its configuration.
        config_class: dataclass; every field becomes an option with its type checked and its docstring as help.
        description: first lines of --help.
        positional: name of the one field that is given without an option, as one or more words; empty for none.
        argv: the arguments, `sys.argv[1:]` by default; `--batch-size` is read as `--batch_size`.
    Returns:
        Exit code: 0, or 2 after a ValueError or OSError, which stands on stderr as one line.
    """
    parser = _OneLineParser(description=description)
    parser.add_argument("--config", action="config", help="YAML file with values for the options below")
    if positional:
        parser.add_argument(positional, nargs="+", type=str, help=_field_help(config_class, positional))
    parser.add_class_arguments(
        config_class,  # pyright: ignore[reportArgumentType]
        as_group=False,
        skip={positional} if positional else set(),
    )
    values = parser.parse_args(option_names(sys.argv[1:] if argv is None else argv))
    parsed: dict[str, Any] = values.as_dict()
    parsed.pop("config", None)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s")
    try:
        tool(config_class(**parsed))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for example, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {_one_line(str(error)) or type(error).__name__}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    return 0


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _field_help(config_class: Callable[..., Any], name: str) -> str:
    """The text of one field in the docstring's Args section."""
    lines = [line.strip() for line in (config_class.__doc__ or "").splitlines()]
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")
