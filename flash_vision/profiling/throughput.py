"""Throughput, latency and peak memory of several models, alternating in one process.

Absolute times of a shared machine say little, so each round runs every model once and the ratio to the baseline is
taken within the round: the median over rounds is the figure, the quartiles are its noise.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from flash_vision.profiling.build import check_model_name, first_line, is_out_of_memory
from flash_vision.profiling.memory import PeakMemory, child_peak, device_peak
from flash_vision.profiling.steps import Case, build_step

MIN_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """A grid of cases and how long to look at each.

    Args:
        models: timm names.
        baseline: one of `models`, whose time over a model's is that model's ratio; the first of them when empty.
        modes, precisions, compiled, img_sizes, batch_sizes: every combination is one case, see `Case`.
        device: torch device name.
        channels_last: memory format of all models.
        rounds: times that every model is sampled, at most.
        max_seconds: per case: rounds end early after it, never before `MIN_ROUNDS`.
        min_ms: a sample repeats the step until it takes about so many milliseconds.
        warmup: untimed steps per model, the first compiles.
        memory: whether to measure peak memory; on a CPU each model then runs in a child process first.

    Raises:
        ValueError: no model, an unknown one, a baseline that is not among them, or a value that `Case` rejects.
    """

    models: Sequence[str]
    baseline: str = ""
    modes: Sequence[str] = ("infer",)
    precisions: Sequence[str] = ("fp32",)
    compiled: Sequence[bool] = (False,)
    img_sizes: Sequence[int | tuple[int, int]] = (224,)
    batch_sizes: Sequence[int] = (8,)
    device: str = "cpu"
    channels_last: bool = False
    rounds: int = 20
    max_seconds: float = 60.0
    min_ms: float = 100.0
    warmup: int = 3
    memory: bool = True

    def __post_init__(self) -> None:
        for name in self.models:
            check_model_name(name)
        if not self.models:
            raise ValueError("models must name at least one model, got none")
        if not self.baseline:
            object.__setattr__(self, "baseline", self.models[0])
        if self.baseline not in self.models:
            raise ValueError(f"baseline must be one of the models {', '.join(self.models)}, got {self.baseline!r}")
        for key in ("rounds", "warmup"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if not self.cases():
            raise ValueError("modes, precisions, compiled, img_sizes and batch_sizes must each name at least one value")

    def cases(self) -> list[Case]:
        """Every combination, in the order in which they are measured."""
        grid = itertools.product(self.modes, self.precisions, self.compiled, self.img_sizes, self.batch_sizes)
        return [
            Case(
                mode=mode,
                precision=precision,
                compiled=compiled,
                img_size=size,
                batch_size=batch,
                device=self.device,
                channels_last=self.channels_last,
            )
            for mode, precision, compiled, size, batch in grid
        ]


@dataclass
class _Contender:
    """One model in one case."""

    name: str
    step: Callable[[], None] | None = None
    status: str = "ok"
    memory: PeakMemory | None = None
    first_step_s: float | None = None
    steps_per_round: int = 1
    seconds: list[float] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        """Records why the model drops out and lets go of it."""
        self.status = "out of memory" if is_out_of_memory(error) else f"failed: {first_line(error)}"
        self.step = None


def run_benchmark(
    settings: BenchmarkSettings, *, deadline: float | None = None, expected_s: float = 0.0
) -> list[dict[str, Any]]:
    """Measures the grid.

    Args:
        settings: the grid.
        deadline: a reading of `time.monotonic`; a case that would, by the longest one so far, end after it is skipped.
        expected_s: what the first case is expected to take, for the deadline.

    Returns:
        One row per case and model: the case's fields, `status` ("ok", "out of memory", "failed: ...", "skipped: ..."),
        `images_per_s`, `latency_ms` of a step with quartiles, `ratio` (baseline's time over this model's in the
        same round, above 1 is faster) with quartiles, `peak_memory_mib`, of which `step_memory_mib` came with the
        model (on a CPU the rest is interpreter and libraries), `first_step_s` (compilation included), `rounds` and
        `steps_per_round`.
    """
    _settle(settings.device)
    cases, longest, rows = settings.cases(), expected_s, []
    with tqdm(total=len(cases) * len(settings.models), desc="benchmark", unit="model", disable=None) as bar:
        for case in cases:
            start = time.monotonic()
            if deadline is not None and start + longest > deadline:
                rows += [
                    _row(_Contender(n, status="skipped: time budget"), case, settings, None) for n in settings.models
                ]
                bar.update(len(settings.models))
                continue
            rows += run_case(case, settings, bar)
            longest = max(longest, time.monotonic() - start)
    return rows


def _settle(device: str) -> None:
    """Makes a GPU the current one and has its workspaces allocated, so that no model is charged for them."""
    chosen = torch.device(device)
    if chosen.type == "cuda":
        if chosen.index is not None:
            torch.cuda.set_device(chosen)
        torch.mm(torch.ones(64, 64, device=chosen), torch.ones(64, 64, device=chosen))


def run_case(case: Case, settings: BenchmarkSettings, bar: Any = None) -> list[dict[str, Any]]:
    """Measures all models in one case; a model that fails leaves a row that says so and the others go on."""
    if case.compiled:
        torch._dynamo.reset()
    contenders = [_Contender(name) for name in settings.models]
    for contender in contenders:
        if bar is not None:
            bar.set_postfix_str(f"{contender.name} {case.mode} {case.precision} {case.img_size} px x {case.batch_size}")
        _prepare(contender, case, settings)
        if bar is not None:
            bar.update()
    _alternate(contenders, case, settings)
    baseline = next(c for c in contenders if c.name == settings.baseline)
    rows = [_row(contender, case, settings, baseline) for contender in contenders]
    contenders.clear()
    del baseline
    _release(case)
    return rows


def _prepare(contender: _Contender, case: Case, settings: BenchmarkSettings) -> None:
    """Memory, construction, warm-up and the number of steps in a sample."""
    on_gpu = torch.device(case.device).type == "cuda"
    if settings.memory and not on_gpu:
        contender.memory = child_peak(contender.name, case, threads=torch.get_num_threads())
        if contender.memory.status != "ok":
            contender.status = contender.memory.status
            return
    try:
        _release(case)
        held = torch.cuda.memory_allocated() if on_gpu else 0
        contender.step = build_step(contender.name, case)
        contender.first_step_s = _seconds(contender.step, 1, case)
        for _ in range(settings.warmup - 1):
            contender.step()
        if settings.memory and on_gpu:
            contender.memory = device_peak(contender.step, held)
        once = _seconds(contender.step, 1, case)
        contender.steps_per_round = max(1, math.ceil(settings.min_ms / 1e3 / max(once, 1e-6)))
    except Exception as error:  # whatever a model does, the others are still measured
        contender.fail(error)
        _release(case)


def _alternate(contenders: list[_Contender], case: Case, settings: BenchmarkSettings) -> None:
    """Samples every model once per round, each round starting with another one."""
    start = time.monotonic()
    for done in range(settings.rounds):
        if done >= MIN_ROUNDS and time.monotonic() - start > settings.max_seconds:
            return
        shift = done % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            if contender.step is None:
                continue
            try:
                seconds = _seconds(contender.step, contender.steps_per_round, case)
            except Exception as error:  # as in _prepare
                contender.fail(error)
                continue
            contender.seconds.append(seconds / contender.steps_per_round)


def _seconds(step: Callable[[], None], repeats: int, case: Case) -> float:
    if torch.device(case.device).type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3
    begin_s = time.perf_counter()
    for _ in range(repeats):
        step()
    return time.perf_counter() - begin_s


def _release(case: Case) -> None:
    gc.collect()
    if torch.device(case.device).type == "cuda":
        torch.cuda.empty_cache()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; a single value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _row(contender: _Contender, case: Case, settings: BenchmarkSettings, baseline: _Contender | None) -> dict[str, Any]:
    row: dict[str, Any] = {"model": contender.name, **dataclasses.asdict(case), "status": contender.status}
    row |= dict.fromkeys(("images_per_s", "latency_ms", "latency_ms_q25", "latency_ms_q75"))
    row |= {"baseline": settings.baseline, "ratio": None, "ratio_q25": None, "ratio_q75": None}
    measured = contender.status == "ok" and contender.seconds
    if measured:
        low, middle, high = quartiles(contender.seconds)
        row |= {"images_per_s": case.batch_size / middle, "latency_ms": middle * 1e3}
        row |= {"latency_ms_q25": low * 1e3, "latency_ms_q75": high * 1e3}
        if baseline is not None and baseline.status == "ok":
            pairs = zip(baseline.seconds, contender.seconds, strict=True)
            row["ratio_q25"], row["ratio"], row["ratio_q75"] = quartiles([b / own for b, own in pairs])
    peak = contender.memory if contender.memory is not None and contender.memory.status == "ok" else None
    row["peak_memory_mib"] = None if peak is None else peak.peak_mib
    row["step_memory_mib"] = None if peak is None else peak.peak_mib - peak.idle_mib
    row["first_step_s"] = contender.first_step_s
    row["rounds"] = len(contender.seconds) if measured else 0
    row["steps_per_round"] = contender.steps_per_round if measured else None
    return row
