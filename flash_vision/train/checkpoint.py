"""A run's folder: who owns it, and checkpoints that a crash at any moment leaves readable.

Layout: run.json (resolved configuration, versions, commit), config.yaml, metrics.jsonl, curves.png, checkpoints/
(last.pt, previous.pt, best.pt, epoch_0010.pt), model.safetensors and model_best.safetensors with their model.json.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from timm.task import TrainingTask
from timm.utils.model import unwrap_model
from torch import Tensor

from flash_vision.data.files import write_text, written_whole
from flash_vision.train.config import differing_fields
from flash_vision.train.model_source import first_line
from flash_vision.train.parallel import sharded_like, whole

FORMAT = 1
MARKER = "run.json"


@dataclass(kw_only=True)
class Progress:
    """Where a run stands; with the configuration it determines every later batch, learning rate and random number.

    Args:
        epoch: epoch in progress, counted from 0.
        consumed: images of that epoch that updates have taken, over all processes.
        step: updates so far, skipped ones included.
        applied: updates that changed the weights.
        nonfinite: updates skipped in a row, just now, for a loss or gradient that is not finite.
        best: best value of the evaluation metric so far.
        corrupt: images that could not be read, name to reason.
    """

    epoch: int = 0
    consumed: int = 0
    step: int = 0
    applied: int = 0
    nonfinite: int = 0
    best: float | None = None
    corrupt: dict[str, str] = field(default_factory=dict)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(source: Path, target: Path) -> None:
    """Gives a file a second name, in place of what had it; copies where the file system has no hard links."""
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)
    sync_folder(target.parent)


class RunFolder:
    """The folder of one run; nothing is written to it before it is claimed.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    def check(self, config: Mapping[str, Any]) -> None:
        """Checks that the folder is new, or that of a run with this configuration.

        Raises:
            ValueError: it holds something else, or a run whose configuration differs; the fields are named.
        """
        marker = self.path / MARKER
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ValueError(f"run folder {self.path}: is no folder")
        if not marker.exists():
            foreign = [entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")]
            if foreign:
                raise ValueError(f"run folder {self.path}: holds other files ({sorted(foreign)[0]}); name another one")
            return
        try:
            old = json.loads(marker.read_text())["config"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"run folder {self.path}: {MARKER} cannot be read ({first_line(error)})") from None
        if differing := differing_fields(old, config):
            raise ValueError(
                f"run folder {self.path}: belongs to a run with another configuration ({'; '.join(differing)}); "
                "give another --experiment"
            )

    def release(self) -> None:
        """Gives the folder up before the process ends."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def claim(self, description: Mapping[str, Any], config_yaml: str) -> None:
        """Makes the folder this process's own until it ends and writes run.json and config.yaml.

        Raises:
            ValueError: another process is running in it, or it cannot be written.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")  # noqa: SIM115  held until the process ends
        except OSError as error:
            raise ValueError(f"run folder {self.path}: cannot be written ({error.strerror})") from None
        try:
            # a lock of the process, not of the open file, so that loader processes left behind do not keep it
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"run folder {self.path}: another process is running in it") from None
        for leftover in (*self.path.glob(".*.tmp"), *self.checkpoints.glob(".*.tmp")):
            leftover.unlink()
        for name, text in ((MARKER, json.dumps(description, indent=2)), ("config.yaml", config_yaml)):
            write_text(self.path / name, text)

    def save(self, state: Mapping[str, Any], *, keep_as: tuple[str, ...] = ()) -> None:
        """Writes last.pt; what it was before becomes previous.pt. Room for both and a third is needed.

        Args:
            state: tensors and plain data.
            keep_as: further names for this checkpoint, best or epoch_0010.
        Raises:
            OSError: it could not be written; last.pt is what it was.
        """
        last = self.checkpoints / "last.pt"
        try:
            with written_whole(last) as temporary:
                torch.save(dict(state), temporary)
                if last.exists():
                    link(last, self.checkpoints / "previous.pt")
            sync_folder(self.checkpoints)
        except RuntimeError as error:  # torch's writer turns a full disk into one
            raise OSError(f"{last}: {first_line(error)}") from error
        for name in keep_as:
            link(last, self.checkpoints / f"{name}.pt")

    def newest(self) -> tuple[Path, list[str]] | None:
        """The newest checkpoint that can be read, and a line for each one that cannot; None in a new folder.

        Raises:
            ValueError: there are checkpoints and none can be read.
        """
        failures: list[str] = []
        for name in ("last", "previous"):
            path = self.checkpoints / f"{name}.pt"
            if path.exists():
                try:
                    verify(path)
                    return path, failures
                except ValueError as error:
                    failures.append(str(error))
        if failures:
            raise ValueError(f"run folder {self.path}: no checkpoint can be read ({'; '.join(failures)})")
        return None

    def write_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Writes NAME.safetensors, which timm.create_model(checkpoint_path=...) reads.

        Raises:
            OSError: it could not be written; the file is what it was.
        """
        path = self.path / f"{name}.safetensors"
        try:
            with written_whole(path) as temporary:
                # clones, because safetensors refuses tensors that share memory
                save_file({key: value.clone().contiguous() for key, value in weights.items()}, temporary)
                temporary.chmod(0o644)  # safetensors makes files that only their owner can read
        except SafetensorError as error:  # what a full disk becomes
            raise OSError(f"{path}: {first_line(error)}") from error
        sync_folder(self.path)


def verify(path: Path) -> None:
    """Reads a checkpoint to the last byte against its checksums, which torch.load alone does not.

    Raises:
        ValueError: truncated, damaged, or of a format that this version does not know.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{path}: cannot be read ({first_line(error)})") from None
    if damaged:
        raise ValueError(f"{path}: damaged ({damaged} has another checksum)")
    read_checkpoint(path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint; nothing in it is executed.

    Raises:
        ValueError: truncated, damaged, or of a format that this version does not know.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged zip or pickle raises is open-ended
        raise ValueError(f"{path}: cannot be read ({first_line(error)})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path}: no training checkpoint of format {FORMAT}")
    return state


def capture(task: TrainingTask, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Model, average, optimiser and scaler as whole tensors on the CPU; all processes must call it together."""
    state = {**task.get_checkpoint_state(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    if task.has_ema():
        state |= task.get_checkpoint_state(ema=True)
    return whole(state)


def restore(
    state: Mapping[str, Any], task: TrainingTask, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Puts back what `capture` took, whatever the number of processes was.

    Raises:
        ValueError: the checkpoint is of another model, or the optimiser's groups differ.
    """
    for suffix in ("", "_ema") if task.has_ema() else ("",):
        own = unwrap_model(task.get_eval_model(ema=bool(suffix))).state_dict()
        saved = {key: sharded_like(value, own[key]) if key in own else value for key, value in
                 state[f"state_dict{suffix}"].items()}  # fmt: skip
        try:
            task.load_checkpoint_state(saved, state.get(f"task_state{suffix}"), ema=bool(suffix))
        except RuntimeError as error:
            problem = " ".join(str(error).split())[:200]
            raise ValueError(f"checkpoint of another model: {problem}") from None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        index: {name: sharded_like(value, parameters[index]) for name, value in entry.items()}
        for index, entry in state["optimizer"]["state"].items()
    }
    optimizer.load_state_dict({**state["optimizer"], "state": moments})
    with suppress(RuntimeError):  # an enabled scaler refuses the empty state of a disabled one, and starts afresh
        scaler.load_state_dict(state["scaler"])
