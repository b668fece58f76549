"""Peak memory of a step: allocated bytes on a GPU, the resident size of a child process on a CPU.

`python -m flash_vision.profiling.memory '{"model": ..., ...}'` is that child.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flash_vision.profiling.build import first_line, is_out_of_memory
from flash_vision.profiling.steps import Case, build_step

MIB = 2**20
CHILD_STEPS = 2


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """Peak memory of one model's step in MiB.

    Args:
        peak_mib: on a GPU the most that the allocator held for this model (weights, optimiser, activations); on a
            CPU the most that was resident in a process that runs only this, interpreter and libraries included.
        idle_mib: of that, what was there before the model was built (0 on a GPU).
        status: "ok", "out of memory", or "failed: ...", with NaN-free zeros for the figures.
    """

    peak_mib: float
    idle_mib: float
    status: str = "ok"


def device_peak(step: Callable[[], None], held_before: int) -> PeakMemory:
    """Runs one warmed-up step on the current GPU and reads the allocator's peak.

    Args:
        step: has run at least once, so that optimiser states exist.
        held_before: bytes allocated before the model was built: other models' weights, not to be counted.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return PeakMemory((torch.cuda.max_memory_allocated() - held_before) / MIB, 0.0)


def child_peak(name: str, case: Case, *, threads: int) -> PeakMemory:
    """Runs `CHILD_STEPS` steps in a process of their own and returns its peak resident size.

    Args:
        name: timm model name that `import flash_vision` or timm registers.
        case: what to run; its device must be the CPU.
        threads: for the child.
    """
    assert torch.device(case.device).type == "cpu", case.device
    request = json.dumps({"model": name, "threads": threads, "case": dataclasses.asdict(case)})
    command = [sys.executable, "-m", "flash_vision.profiling.memory", request]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode < 0:
        return PeakMemory(0.0, 0.0, f"out of memory (child process ended by signal {-run.returncode})")
    if run.returncode > 0:
        lines = run.stderr.strip().splitlines()
        return PeakMemory(0.0, 0.0, f"failed: {lines[-1] if lines else f'exit code {run.returncode}'}")
    return PeakMemory(**json.loads(run.stdout.splitlines()[-1]))


def _peak_resident_mib() -> float:
    """Peak resident size of this process; on Linux of this program, not of the one that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / MIB


def resident_peak(request: dict[str, Any]) -> PeakMemory:
    """What the child does: builds the model of a request of `child_peak`, runs its steps, reads its own peak."""
    torch.set_num_threads(request["threads"])
    size = request["case"].pop("img_size")
    case = Case(img_size=size if isinstance(size, int) else tuple(size), **request["case"])
    idle = _peak_resident_mib()
    try:
        step = build_step(request["model"], case)
        for _ in range(CHILD_STEPS):
            step()
    except Exception as error:  # any failure of the model is a result here
        status = "out of memory" if is_out_of_memory(error) else f"failed: {first_line(error)}"
        return PeakMemory(0.0, 0.0, status)
    return PeakMemory(_peak_resident_mib(), idle)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(resident_peak(json.loads(sys.argv[1])))))
