"""Finds objects: python tools/detect.py IMAGE_OR_FOLDER... --checkpoint FILE --picture_dir DIR.

With --annotations FILE it searches the images of a COCO file and prints COCO's figures.
"""

import sys

from flash_vision.dense.detection_predict import DetectConfig, detect
from flash_vision.train.command_line import run_tool


def main(config: DetectConfig) -> None:
    search = detect(config)
    if search.annotated:
        print(", ".join(f"{count} {what}" for what, count in search.annotated.items()), file=sys.stderr)
    for found in search.detections:
        counts: dict[str, int] = {}
        for thing in found.objects:
            counts[thing.label] = counts.get(thing.label, 0) + 1
        print(found.file, found.error or ", ".join(f"{n} {name}" for name, n in counts.items()) or "nothing", sep="\t")
    for name, value in search.figures.items():
        print(f"{name}\t{value:.4f}")
    if failed := sum(found.error is not None for found in search.detections):
        print(f"{failed} of {len(search.detections)} images could not be read", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_tool(main, DetectConfig, description=__doc__, positional="images"))
