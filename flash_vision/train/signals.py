"""Ending a run on SIGTERM or SIGINT with its state saved, and the exit codes of tools/train.py."""

from __future__ import annotations

import signal
from types import FrameType

EXIT_DONE = 0
EXIT_USAGE = 2  # a mistake in the command line, the configuration or the data; nothing was trained
EXIT_FAILED = 3  # the run cannot go on: loss not finite, too many corrupt images
EXIT_NOT_SAVED = 74  # the last state could not be written (EX_IOERR); the previous checkpoint is intact
EXIT_INTERRUPTED = 75  # stopped by a signal with its state saved (EX_TEMPFAIL); the same command continues it


class StopRequest:
    """Remembers SIGTERM and SIGINT; a second one of the same kind has its usual effect."""

    def __init__(self) -> None:
        self.signal: int = 0

    def install(self) -> None:
        """Takes over the two signals; only the main thread may."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)


class TrainingError(RuntimeError):
    """The run cannot go on; the message says at which step and why."""
