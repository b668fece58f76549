"""The training loop, for every task: it drives a timm TrainingTask, a loader of updates and an evaluation.

The unit of progress is the update (one optimiser step over `images_per_update` images). Everything random in an update
is a function of seed, epoch, position and rank, the learning rate one of the position; so `Progress` and the weights
are all that a continuation needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from timm.utils.clip_grad import dispatch_clip_grad
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flash_vision.train.checkpoint import Progress, RunFolder, capture
from flash_vision.train.config import TaskConfig
from flash_vision.train.data import Batch, TrainLoader
from flash_vision.train.parallel import Processes, without_sync
from flash_vision.train.reporting import Reporter, peak_memory_mb
from flash_vision.train.samples import Problem
from flash_vision.train.seeding import set_seed
from flash_vision.train.signals import EXIT_DONE, EXIT_INTERRUPTED, EXIT_NOT_SAVED, StopRequest, TrainingError

Metrics = dict[str, float]


class Evaluation(Protocol):
    """Evaluates the weights or their average: metrics and unreadable images, or None after a stop request."""

    def __call__(self, *, ema: bool) -> tuple[Metrics, list[Problem]] | None: ...


class Loop:
    """One run, from wherever `progress` stands to the end.

    Args:
        task: gives the loss; its model may be wrapped by DDP, sharded or compiled.
        scheduler: timm scheduler, or None for a constant learning rate.
        num_epochs: epochs to train, cooldown included.
        evaluate: see `Evaluation`.
        eval_metric: the metric that "best" goes by; the highest is best, of `loss` the lowest.
        export: writes weights for users under a name, from a captured state.
        extra_state: what else a checkpoint holds.
        notes: what reading the data set left out or changed, by the split's name; said, and kept in the metrics.
    """

    def __init__(
        self,
        config: TaskConfig,
        task: TrainingTask,
        loader: TrainLoader,
        *,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        scaler: torch.amp.GradScaler,
        autocast: Callable[[], AbstractContextManager[Any]],
        num_epochs: int,
        evaluate: Evaluation,
        eval_metric: str,
        export: Callable[[str, dict[str, Any]], None],
        progress: Progress,
        processes: Processes,
        folder: RunFolder,
        reporter: Reporter,
        stop: StopRequest,
        extra_state: dict[str, Any],
        notes: Mapping[str, Mapping[str, int]],
    ) -> None:
        self.config, self.task, self.loader = config, task, loader
        self.optimizer, self.scheduler, self.scaler, self.autocast = optimizer, scheduler, scaler, autocast
        self.num_epochs, self.evaluate, self.eval_metric, self.export = num_epochs, evaluate, eval_metric, export
        self.progress, self.processes, self.folder, self.reporter = progress, processes, folder, reporter
        self.stop, self.extra_state, self.notes = stop, extra_state, notes
        self.saved = True
        self.metrics: Metrics = {}
        self._clock = 0.0

    def run(self) -> int:
        """Trains to the end, to a stop request or to a failure.

        Returns:
            An exit code of `flash_vision.train.signals`.
        Raises:
            TrainingError: the loss stays non-finite, or too many images cannot be read.
        """
        progress = self.progress
        self.reporter.start(step=progress.step, epoch=progress.epoch)
        for split, counts in self.notes.items():
            self.reporter.say(f"{split}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
            self.reporter.record("data", step=progress.step, split=split, **counts)
        try:
            while progress.epoch < self.num_epochs:
                self.task.train()
                self._clock = time.perf_counter()
                for batches in self.loader.updates(progress.epoch, progress.consumed):
                    stop = self._update(batches)
                    interval = self.config.recovery_interval
                    if stop or (interval and progress.step % interval == 0):
                        self._save()
                    if stop:
                        return self._interrupted()
                if not self._finish_epoch():
                    self._save()
                    return self._interrupted()
            return EXIT_DONE if self.saved else EXIT_NOT_SAVED
        finally:
            self.reporter.close()

    def _update(self, batches: list[Batch]) -> bool:
        """One optimiser step; whether a stop was requested in any process."""
        progress, config = self.progress, self.config
        set_seed("update", config.seed, progress.step, self.processes.rank)
        self._schedule()
        loss = torch.zeros((), device=self.processes.device, dtype=torch.float64)
        parts: dict[str, torch.Tensor] = {}
        for number, batch in enumerate(batches, start=1):
            batch = self.loader.prepare(batch, progress.epoch)
            with without_sync(self.task, last=number == len(batches)):
                with self.autocast():
                    result = self.task(batch.inputs, batch.targets)
                    share = result["loss"] / len(batches)
                self.scaler.scale(share).backward()
            loss += share.detach()
            for name, part in result.items():
                if name != "loss" and part.ndim == 0:
                    parts[name] = parts.get(name, 0) + part.detach().to(loss) / len(batches)
        self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        problems = [problem for batch in batches for problem in batch.problems]
        # one exchange, and one wait for the device, per update
        values = torch.stack([loss, norm.to(loss), *parts.values()]).div_(self.processes.world_size)
        flags = torch.tensor([bool(self.stop.signal), bool(problems)], device=loss.device, dtype=loss.dtype)
        stop, lost, mean_loss, mean_norm, *means = self.processes.sum(torch.cat([flags, values])).tolist()
        progress.consumed += self.loader.images_per_update
        progress.step += 1
        if lost:
            self._account(problems)
        # with a loss scaler an infinite gradient is part of the search for the scale, which the scaler deals with
        if math.isfinite(mean_loss) and (math.isfinite(mean_norm) or self.scaler.is_enabled()):
            progress.nonfinite = 0
            progress.applied += 1
            self.scaler.step(self.optimizer)
            self.task.update_ema(step=progress.applied)
        else:
            self._skip(batches, loss=mean_loss, norm=mean_norm)
        if self.scaler.is_enabled():
            self.scaler.update()
        self.optimizer.zero_grad()
        self._report(mean_loss, mean_norm, dict(zip(parts, means, strict=True)))
        return bool(stop)

    def _schedule(self) -> None:
        """Sets the learning rate of the update that comes next."""
        if self.scheduler is not None:
            progress = self.progress
            done = progress.consumed // self.loader.images_per_update
            self.scheduler.step(progress.epoch)
            self.scheduler.step_update(progress.epoch * self.loader.updates_per_epoch + done)

    def _clip(self) -> torch.Tensor:
        """Clips the gradients as configured; their 2-norm before, on the device."""
        parameters = [p for p in self.task.get_clip_parameters() if p.grad is not None]
        total = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.config.clip_grad is not None and self.config.clip_mode == "norm":
            clip_grads_with_norm_(parameters, self.config.clip_grad, total)
        elif self.config.clip_grad is not None:
            dispatch_clip_grad(parameters, self.config.clip_grad, mode=self.config.clip_mode)
        return total.full_tensor() if isinstance(total, DTensor) else total

    def _skip(self, batches: list[Batch], *, loss: float, norm: float) -> None:
        """Leaves the weights as they are; after too many in a row, ends the run with what is needed to look into it."""
        progress, limit = self.progress, self.config.max_nonfinite_steps
        progress.nonfinite += 1
        what = f"step {progress.step}: loss {loss}, gradient norm {norm}, learning rate {self._lr():.3g}"
        names = [name for batch in batches for name in self.loader.names(batch)]
        files = [name for part in self.processes.gather(names) for name in part]
        self.reporter.record("event", step=progress.step, event="nonfinite", loss=str(loss), files=files)
        if progress.nonfinite > limit:
            shown = ", ".join(files[:4]) + (f" and {len(files) - 4} more (metrics.jsonl)" if len(files) > 4 else "")
            raise TrainingError(f"{what}; {limit} updates in a row were skipped before it. Its images: {shown}")
        self.reporter.say(f"warning: {what}; update skipped ({progress.nonfinite} of {limit} in a row)")

    def _account(self, problems: list[Problem]) -> None:
        """Notes the unreadable images of all processes; too many, measured by the training images, end the run."""
        corrupt, limit, of = self.progress.corrupt, self.config.max_corrupt_fraction, self.loader.num_images
        for name, reason in (problem for part in self.processes.gather(problems) for problem in part):
            if name not in corrupt:
                corrupt[name] = reason
                self.reporter.say(f"warning: skipped {name}: {reason}")
                self.reporter.record("event", step=self.progress.step, event="corrupt", file=name, reason=reason)
        if len(corrupt) > limit * of:
            raise TrainingError(
                f"step {self.progress.step}: {len(corrupt)} images could not be read, more than max_corrupt_fraction "
                f"{limit} of the {of} training images; the last: {next(reversed(corrupt))}"
            )

    def _report(self, loss: float, norm: float, parts: Metrics) -> None:
        progress, config = self.progress, self.config
        before, self._clock = self._clock, time.perf_counter()
        speed = self.loader.images_per_update / (self._clock - before)
        self.reporter.advance(progress.step, loss=loss, lr=self._lr(), norm=norm, **{"images/s": speed})
        if progress.step % config.log_interval == 0 or progress.step == 1:
            self.reporter.record(
                "train",
                step=progress.step,
                epoch=progress.epoch,
                loss=loss,
                lr=self._lr(),
                grad_norm=norm,
                images_per_s=round(speed, 2),
                peak_memory_mb=round(peak_memory_mb(self.processes.device), 1),
                corrupt=len(progress.corrupt),
                **parts,
            )

    def _finish_epoch(self) -> bool:
        """Evaluates if it is time, moves on to the next epoch and saves; False after a stop request."""
        progress, config = self.progress, self.config
        done = progress.epoch + 1
        names: list[str] = [f"epoch_{done:04d}"] if config.keep_every and done % config.keep_every == 0 else []
        evaluated = done % config.val_interval == 0 or done == self.num_epochs
        if evaluated:
            metrics: Metrics = {}
            for suffix in ("", "_ema") if self.task.has_ema() else ("",):
                result = self.evaluate(ema=bool(suffix))
                if result is None:
                    return False
                found, problems = result
                metrics |= {f"{name}{suffix}": value for name, value in found.items()}
                self._account(problems)
            self.metrics = metrics
            value = self._decisive(metrics)
            better = progress.best is None or (value < progress.best) == (self.eval_metric == "loss")
            if better and value != progress.best:
                progress.best = value
                names.append("best")
            self.reporter.record("eval", step=progress.step, epoch=progress.epoch, best=progress.best, **metrics)
            # a name with a slash is one row of a table, for example of a class: kept, not shown
            shown = ", ".join(f"{name} {metric:.4g}" for name, metric in metrics.items() if "/" not in name)
            self.reporter.say(f"epoch {done}/{self.num_epochs}: {shown}")
            self.reporter.draw()
        progress.epoch, progress.consumed = done, 0
        self._save(tuple(names), export=evaluated)
        return True

    def _decisive(self, metrics: Metrics) -> float:
        """The metric that decides what "best" means."""
        name = self.eval_metric + ("_ema" if self.task.has_ema() else "")
        if name not in metrics:
            raise TrainingError(
                f"step {self.progress.step}: eval_metric {name} cannot be computed from the validation split, which "
                f"gave {', '.join(metrics) or 'nothing'}"
            )
        return metrics[name]

    def _save(self, keep_as: tuple[str, ...] = (), *, export: bool = False) -> None:
        """Writes a checkpoint and, if asked, the weights for users; a failure is reported and the run goes on."""
        state = capture(self.task, self.optimizer, self.scaler)
        if self.processes.is_main:
            content = {**self.extra_state, **state, "progress": vars(self.progress)}
            try:
                self.folder.save(content, keep_as=keep_as)
                if export:
                    self.export("model", state)
                    if "best" in keep_as:
                        self.export("model_best", state)
                self.saved = True
            except OSError as error:
                self.saved = False
                self.reporter.say(f"warning: nothing saved at step {self.progress.step}: {error}")
                self.reporter.record("event", step=self.progress.step, event="not saved", reason=str(error))
        self.processes.barrier()

    def _interrupted(self) -> int:
        state = "saved; the same command continues" if self.saved else "NOT saved"
        self.reporter.say(f"stopped by a signal at step {self.progress.step}, state {state}")
        return EXIT_INTERRUPTED if self.saved else EXIT_NOT_SAVED

    def _lr(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)
