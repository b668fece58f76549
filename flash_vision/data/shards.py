"""WebDataset shards from a class folder, as timm's `wds/` reader takes them.

The order of the images follows from the folder and the seed alone, so every shard can be made by itself: several
processes work side by side, and running the same command again makes only the shards that are missing. A shard has
its temporary name until it is whole. In a shard each image is three members: KEY.jpg or KEY.png (the original bytes),
KEY.cls (the class index) and KEY.json (file name and class name). `_info.json` comes last, when every shard is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import random
import signal
import tarfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from timm.data.readers.reader_image_folder import find_images_and_targets
from tqdm import tqdm

from flash_vision.data.class_folder import CorruptImageError, check_class_folder, decode
from flash_vision.data.files import write_text, written_whole

INFO_NAME = "_info.json"


@dataclass(kw_only=True)
class ShardConfig:
    """One split to turn into shards.

    Args:
        data_dir: folder of class/image files (.jpg, .jpeg, .png).
        output: folder for the shards and _info.json; several splits may share it.
        split: name of the split, part of the shards' names.
        shard_size: images a shard.
        seed: of the shuffle; the same seed and folder give the same shards, byte for byte.
        corrupt: what to do with an image that does not decode: refuse to finish, skip it, or keep every file unread.
        workers: processes that write shards; 0 writes in the main process.
    Raises:
        ValueError: a field out of its range.
    """

    data_dir: str
    output: str
    split: str = "train"
    shard_size: int = 1000
    seed: int = 0
    corrupt: Literal["refuse", "skip", "keep"] = "refuse"
    workers: int = 0

    def __post_init__(self) -> None:
        for name, least in (("shard_size", 1), ("workers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if not self.split or not self.split.replace("_", "").isalnum() or "tar" in self.split:
            raise ValueError(f"split must be letters, digits and _, without 'tar', got {self.split!r}")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One tar file: its name, how many images it holds, and the files left out of it with the reason."""

    name: str
    num_samples: int
    corrupt: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a worker needs for one shard: (file relative to `root`, class index) pairs and class names."""

    name: str
    root: str
    output: str
    samples: list[tuple[str, int]]
    class_names: list[str]
    corrupt: str


def make_shards(config: ShardConfig) -> dict[str, Any]:
    """Writes the shards that are missing, then _info.json.

    Args:
        config: the folder and how to cut it.
    Returns:
        The entry of the split in _info.json: `name`, `num_samples`, `filenames`, `shard_lengths`, `alt_label`,
        `corrupt` (file to reason), `fingerprint`.
    Raises:
        ValueError: empty folder or class folder, `output` holding another data set's shards, or corrupt images under
            corrupt="refuse"; finished shards stay and are not made again.
    """
    check_class_folder(config.data_dir)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    with _sole_writer(output):
        for leftover in output.glob(f".{config.split}-*.tar.*.tmp"):  # of a run that was killed
            leftover.unlink()
        return _make_missing(config, output)


def _make_missing(config: ShardConfig, output: Path) -> dict[str, Any]:
    """make_shards, once it is the only writer in `output`."""
    samples, class_names = _shuffled_samples(config)
    fingerprint = _fingerprint(samples, class_names, config)
    info = _read_info(output)
    if info and info["class_names"] != class_names:
        raise ValueError(f"{output}: its shards have other classes than {config.data_dir}")
    if config.split in info.get("splits", {}):
        if info["splits"][config.split]["fingerprint"] != fingerprint:
            raise ValueError(f"{output}: holds a finished split {config.split!r} of other images, seed or shard_size")
        return info["splits"][config.split]

    count = -(-len(samples) // config.shard_size)
    names = [f"{config.split}-{index:06d}.tar" for index in range(count)]
    done = _read_progress(output, config, fingerprint)
    jobs = (
        _Job(
            name=name,
            root=config.data_dir,
            output=config.output,
            samples=samples[index * config.shard_size : (index + 1) * config.shard_size],
            class_names=class_names,
            corrupt=config.corrupt,
        )
        for index, name in enumerate(names)
        if name not in done
    )
    refused: dict[str, str] = {}
    total = sum(shard.num_samples + len(shard.corrupt) for shard in done.values())
    with tqdm(total=len(samples), initial=total, unit="image", disable=None, leave=False) as bar:
        for shard, num_images in _run(jobs, config.workers):
            if shard.corrupt and config.corrupt == "refuse":
                refused |= shard.corrupt
            else:
                done[shard.name] = shard
                _append_progress(output, config, shard)
            bar.update(num_images)
    if refused:
        listed = "; ".join(f"{name}: {reason}" for name, reason in sorted(refused.items())[:20])
        raise ValueError(f"{len(refused)} corrupt images (leave them out with --corrupt skip): {listed}")
    if not any(shard.num_samples for shard in done.values()):
        raise ValueError(f"{config.data_dir}: none of its {len(samples)} images can be read")
    entry = _entry(config, [done[name] for name in names], fingerprint)
    info = {"name": Path(config.data_dir).resolve().name, "class_names": class_names, "splits": {}} | info
    info["splits"] = info["splits"] | {config.split: entry}
    write_text(output / INFO_NAME, json.dumps(info, indent=1, ensure_ascii=False) + "\n")
    _progress_path(output, config).unlink(missing_ok=True)
    return entry


@contextlib.contextmanager
def _sole_writer(output: Path) -> Iterator[None]:
    """Holds a lock on the folder, which ends with the process however that ends."""
    descriptor = os.open(output, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"{output}: another run is writing there") from None
    finally:
        os.close(descriptor)


def _shuffled_samples(config: ShardConfig) -> tuple[list[tuple[str, int]], list[str]]:
    """All images as (file relative to the root, class index), shuffled, and the class names in timm's order."""
    found, class_to_idx = find_images_and_targets(config.data_dir)
    samples = [(os.path.relpath(file, config.data_dir), target) for file, target in found]
    random.Random(config.seed).shuffle(samples)
    return samples, sorted(class_to_idx, key=class_to_idx.__getitem__)


def _fingerprint(samples: list[tuple[str, int]], class_names: list[str], config: ShardConfig) -> str:
    """Hash of all that decides what is in which shard, the images' sizes included; their bytes are not read."""
    digest = hashlib.sha256(json.dumps([class_names, config.shard_size, config.corrupt == "keep"]).encode())
    for file, target in samples:
        size = os.stat(os.path.join(config.data_dir, file)).st_size
        digest.update(f"{file}\0{target}\0{size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _run(jobs: Iterator[_Job], workers: int) -> Iterator[tuple[Shard, int]]:
    """Each finished shard with the number of images read for it, in any order."""
    if not workers:
        for job in jobs:
            yield _write_shard(job)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_leave_interrupts_to_the_parent) as pool:
        running = {pool.submit(_write_shard, job) for job in itertools.islice(jobs, 2 * workers)}
        try:
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(_write_shard, job) for job in itertools.islice(jobs, len(finished))}
                for future in finished:
                    yield future.result()
        except BrokenProcessPool:
            raise ValueError("a worker process was killed; run the same command again to go on") from None


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _write_shard(job: _Job) -> tuple[Shard, int]:
    """Writes one tar; one without an image, or to be refused for a corrupt image, is not kept."""
    path = Path(job.output) / job.name
    corrupt: dict[str, str] = {}
    keys: set[str] = set()
    with written_whole(path) as temporary, tarfile.open(temporary, mode="w") as tar:
        for name, target in job.samples:
            try:
                content = _read_image(os.path.join(job.root, name), check=job.corrupt != "keep")
            except CorruptImageError as error:
                corrupt[name] = str(error)
                continue
            key = _unique_key(name, keys)
            meta = {"filename": name, "label": target, "class": job.class_names[target]}
            suffix = "png" if name.lower().endswith(".png") else "jpg"
            _add(tar, f"{key}.{suffix}", content)
            _add(tar, f"{key}.cls", str(target).encode())
            _add(tar, f"{key}.json", json.dumps(meta).encode())
    if not keys or (corrupt and job.corrupt == "refuse"):
        path.unlink()
    return Shard(name=job.name, num_samples=len(keys), corrupt=corrupt), len(job.samples)


def _read_image(path: str, *, check: bool) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise CorruptImageError(f"cannot be read ({error.strerror})") from None
    if check:
        decode(content)
    return content


def _unique_key(name: str, keys: set[str]) -> str:
    """The file name without its extension; WebDataset ends a key at the first dot of the base name."""
    folder, base = os.path.split(os.path.splitext(name)[0])
    stem = key = os.path.join(folder, base.replace(".", "_"))
    number = 1
    while key in keys:
        number += 1
        key = f"{stem}-{number}"
    keys.add(key)
    return key


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _entry(config: ShardConfig, shards: list[Shard], fingerprint: str) -> dict[str, Any]:
    kept = [shard for shard in shards if shard.num_samples]
    return {
        "name": config.split,
        "num_samples": sum(shard.num_samples for shard in kept),
        "filenames": [shard.name for shard in kept],
        "shard_lengths": [shard.num_samples for shard in kept],
        "alt_label": "",
        "corrupt": {name: reason for shard in shards for name, reason in shard.corrupt.items()},
        "fingerprint": fingerprint,
    }


def _read_info(output: Path) -> dict[str, Any]:
    path = output / INFO_NAME
    if not path.exists():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(info["class_names"], list) and all("fingerprint" in entry for entry in info["splits"].values()):
            return info
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path}: not written by this tool")


def _progress_path(output: Path, config: ShardConfig) -> Path:
    return output / f".{config.split}.progress.jsonl"


def _read_progress(output: Path, config: ShardConfig, fingerprint: str) -> dict[str, Shard]:
    """The shards that an earlier run finished; starts the progress file where there is none."""
    path = _progress_path(output, config)
    if not path.exists():
        strangers = sorted(output.glob(f"{config.split}-*.tar"))
        if strangers:
            raise ValueError(f"{strangers[0]}: already there, but not from an unfinished run of this tool")
        write_text(path, json.dumps({"fingerprint": fingerprint}) + "\n")
        return {}
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # the line a crash cut short: its shard is made again
            continue
    if not lines or lines[0].get("fingerprint") != fingerprint:
        raise ValueError(f"{output}: holds part of a split {config.split!r} of other images, seed or shard_size")
    shards = [Shard(**line) for line in lines[1:]]
    done = {shard.name: shard for shard in shards if not shard.num_samples or (output / shard.name).is_file()}
    header = {"fingerprint": fingerprint}
    write_text(path, "".join(json.dumps(line) + "\n" for line in (header, *map(asdict, done.values()))))
    return done


def _append_progress(output: Path, config: ShardConfig, shard: Shard) -> None:
    with open(_progress_path(output, config), "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(shard)) + "\n")
        file.flush()
        os.fsync(file.fileno())
