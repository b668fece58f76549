"""Runs the command-line tools as processes of their own, without paying for the imports each time."""

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).parent.parent / "tools"

# Imports what the tools import, then forks for each request; the child becomes `python tools/NAME.py` to the letter.
_SERVER = """
import gc, json, os, runpy, sys
import flash_vision.data.shards, flash_vision.train.averaging, flash_vision.train.picture
import flash_vision.train.predict, flash_vision.train.reports
gc.collect(), gc.freeze()
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(os.open(request[name], os.O_RDWR), number)
        sys.argv = request["argv"]
        code = 1
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as leave:
            code = leave.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Finished:
    code: int
    stdout: str
    stderr: str

    def refused(self) -> str:
        """The one line on stderr of a run that ended with exit code 2."""
        assert self.code == 2, self
        assert self.stderr.count("\n") == 1, self.stderr
        assert "Traceback" not in self.stderr
        return self.stderr


def run_tool(tool: str, *arguments: object, stdin: str = "") -> Finished:
    """Runs tools/NAME.py with these arguments, in the way of subprocess.run."""
    return _warm_process().run(tool, arguments, stdin)


@functools.cache
def _warm_process() -> "_WarmProcess":
    return _WarmProcess()


class _WarmProcess:
    """A Python with the imports done, which forks into a tool for each request; one for all tests of a process."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        environment = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
            text=True,
        )
        atexit.register(self.close)
        assert self._answer() == "ready"

    def run(self, tool: str, arguments: tuple[object, ...], stdin: str) -> Finished:
        streams = {name: self.folder / name for name in ("stdin", "stdout", "stderr")}
        for name, path in streams.items():
            path.write_text(stdin if name == "stdin" else "")
        request: dict[str, object] = {name: str(path) for name, path in streams.items()}
        request["argv"] = [str(TOOLS / f"{tool}.py"), *map(str, arguments)]
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Finished(int(self._answer()), streams["stdout"].read_text(), streams["stderr"].read_text())

    def close(self) -> None:
        self.process.communicate(timeout=30)
        shutil.rmtree(self.folder)

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()
