"""Turns a class folder into WebDataset shards: python tools/make_shards.py --data_dir FOLDER --output FOLDER."""

import sys

from flash_vision.data.shards import ShardConfig, make_shards
from flash_vision.train.command_line import run_tool


def main(config: ShardConfig) -> None:
    entry = make_shards(config)
    for name, reason in entry["corrupt"].items():
        print(f"left out {name}: {reason}", file=sys.stderr)
    print(
        f"{config.output}: split {config.split}, {entry['num_samples']} images in {len(entry['filenames'])} shards, "
        f"{len(entry['corrupt'])} corrupt left out"
    )


if __name__ == "__main__":
    sys.exit(run_tool(main, ShardConfig, description=__doc__))
