"""What a run shows while it runs: progress bar, metrics.jsonl, TensorBoard, Weights & Biases, and curves.png."""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flash_vision.data.files import write_text, written_whole
from flash_vision.train.config import RunConfig

Record = dict[str, Any]
METRICS = "metrics.jsonl"


class Reporter:
    """Reports of the main process; in the others every method does nothing.

    A report that cannot be written, for example on a full disk, is said once on stderr and does not end the run.

    Args:
        folder: the run's folder, or None in a process that does not report.
        total_steps: updates of the whole run, for the estimate of the time left.
        curves: evaluation metrics that curves.png shows; of averaged weights too.
    """

    def __init__(
        self,
        folder: Path | None,
        config: RunConfig,
        *,
        resolved: Mapping[str, Any],
        total_steps: int,
        curves: Sequence[str],
    ) -> None:
        self.folder = folder
        self.config = config
        self.total_steps = total_steps
        self.curves = curves
        self.bar: tqdm[Any] | None = None
        self.board: Any = None
        self.wandb: Any = None
        self._told: set[str] = set()
        if folder is not None and config.log_wandb:
            self.wandb = _start_wandb(folder, config, resolved)

    def start(self, *, step: int, epoch: int) -> None:
        """Begins at an update of an epoch; what a lost continuation wrote beyond it is dropped from the metrics."""
        if self.folder is None:
            return
        path = self.folder / METRICS
        records = [
            record
            for record in read_metrics(path)
            if record["step"] <= step
            and record["kind"] != "data"  # said again at each start
            and not (record["kind"] == "eval" and record["epoch"] >= epoch)
        ]
        write_text(path, "".join(f"{json.dumps(record)}\n" for record in records))
        if self.config.tensorboard:
            self.board = _start_tensorboard(self.folder, step)
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(
            total=self.total_steps, initial=step, unit="update", mininterval=10.0 if quiet else 0.2, dynamic_ncols=True
        )

    def advance(self, step: int, **shown: float) -> None:
        """Moves the progress bar to an update."""
        if self.bar is not None:
            self.bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()}, refresh=False)
            self.bar.update(step - self.bar.n)

    def record(self, kind: str, *, step: int, **values: Any) -> None:
        """Adds a line to metrics.jsonl and to the services.

        Args:
            kind: train, eval, event or data.
            step: updates so far.
        """
        if self.folder is None:
            return
        line = json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **values})
        try:
            with open(self.folder / METRICS, "a") as file:
                file.write(line + "\n")
        except OSError as error:
            self._tell_once(f"{METRICS} cannot be written ({error.strerror})")
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, (int, float))}
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(numbers, step=step)

    def say(self, message: str) -> None:
        """Prints a line on stderr without breaking the progress bar."""
        if self.folder is not None:
            tqdm.write(message, file=sys.stderr)

    def draw(self) -> None:
        """Draws curves.png from the metrics so far."""
        if self.folder is None or not self.config.curves:
            return
        try:
            draw_curves(read_metrics(self.folder / METRICS), self.folder / "curves.png", self.curves)
        except OSError as error:
            self._tell_once(f"curves.png cannot be written ({error.strerror})")

    def close(self) -> None:
        """Ends the bar and the services."""
        for service, end in ((self.bar, "close"), (self.board, "close"), (self.wandb, "finish")):
            if service is not None:
                getattr(service, end)()

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self.say(f"warning: {message}")


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; a line that a crash has cut short is left out."""
    records: list[Record] = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records


def draw_curves(records: list[Record], path: Path, metrics: Sequence[str]) -> None:
    """Loss, the named evaluation metrics and learning rate over updates, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, quality, rate = figure.subplots(1, 3)
    loss.plot([r["step"] for r in train], [r["loss"] for r in train], lw=1, label="training")
    for name, label in (("loss", "validation"), ("loss_ema", "validation, averaged weights")):
        points = [(r["step"], r[name]) for r in evals if name in r]
        if points:
            loss.plot(*zip(*points, strict=True), marker="o", ms=3, label=label)
    for name in (name for metric in metrics for name in (metric, f"{metric}_ema")):
        points = [(r["step"], r[name]) for r in evals if name in r]
        if points:
            quality.plot(*zip(*points, strict=True), marker="o", ms=3, label=name)
    rate.plot([r["step"] for r in train], [r["lr"] for r in train], lw=1, color="tab:green")
    for axes, title in ((loss, "loss"), (quality, "validation"), (rate, "learning rate")):
        axes.set(title=title, xlabel="update")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    with written_whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def describe_run(config: Mapping[str, Any], *, world_size: int, device: torch.device) -> Record:
    """What run.json holds: resolved configuration, command, git commit, versions and machine."""
    packages = ("torch", "torchvision", "timm", "flash-vision")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "config": config,
        "command": sys.argv,
        "commit": git_commit(),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
        "world_size": world_size,
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def git_commit() -> str | None:
    """The commit of the checkout that this package lies in, with + after it if files differ; None outside of one."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def peak_memory_mb(device: torch.device) -> float:
    """Most memory in use so far, MiB: of the CUDA allocator, or resident in this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _start_tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def _start_wandb(folder: Path, config: RunConfig, resolved: Mapping[str, Any]) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("log_wandb: the package wandb is not installed (pip install wandb)") from None
    return wandb.init(
        project=config.wandb_project or "flash_vision",
        name=folder.name,
        id=folder.name,
        resume="allow",
        dir=str(folder),
        config=dict(resolved),
    )
