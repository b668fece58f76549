"""Segments images: python tools/segment.py --checkpoint FILE --output_dir DIR IMAGE_OR_FOLDER...

Writes NAME.png (class numbers as in the data set's label maps, with the palette), NAME_overlay.png (classes over the
image, with a legend) and results.json (share of each class, in [0, 1]). With --labels FOLDER it prints mean
intersection over union, accuracies and a table per class.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_vision.data.class_folder import CorruptImageError
from flash_vision.data.files import write_text, written_whole
from flash_vision.dense.segmentation_classes import ClassSet, label_image
from flash_vision.dense.segmentation_metrics import format_table
from flash_vision.dense.segmentation_pictures import overlay
from flash_vision.dense.segmentation_predict import (
    Comparison,
    SegmentConfig,
    Segmented,
    as_record,
    load_configured,
    segment,
)
from flash_vision.train.command_line import run_tool
from flash_vision.train.predict import find_images


def main(config: SegmentConfig) -> None:
    loaded = load_configured(config)
    classes = loaded.sidecar.class_set
    files = find_images(config.images)
    comparison = Comparison(config.labels, classes, files) if config.labels else None
    outputs = Outputs(config.output_dir, classes, files, overlays=config.overlays) if config.output_dir else None
    records = []
    for result in segment(config, loaded, files):
        if comparison and result.labels is not None:
            try:
                comparison.add(result)
            except CorruptImageError as error:
                if not config.skip_corrupt:
                    raise
                result = Segmented(file=result.file, error=str(error))
        if outputs and result.labels is not None:
            outputs.write(result)
        record = as_record(result, classes)
        records.append(record)
        if not comparison:
            print(record["file"], record.get("error") or describe(record["shares"]), sep="\t")
    content = {"checkpoint": config.checkpoint, "network": dataclasses.asdict(loaded.sidecar), "images": records}
    if comparison:
        scores, table = comparison.confusion.scores(), comparison.confusion.table(classes.names)
        content |= {"scores": scores, "per_class": table}
        print(format_table(table))
        print(f"{comparison.images} images: " + ", ".join(f"{name} {value:.2f}" for name, value in scores.items()))
    failed = [record for record in records if "error" in record]
    if failed:
        first = f"{failed[0]['file']}: {failed[0]['error']}"
        print(f"{len(failed)} of {len(records)} files could not be read, the first: {first}", file=sys.stderr)
    if outputs:
        write_text(outputs.folder / "results.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


class Outputs:
    """The files of each image in one folder.

    Raises:
        ValueError: the folder holds an image, or two images would get a file of one name.
    """

    def __init__(self, folder: str, classes: ClassSet, files: Sequence[str], *, overlays: bool) -> None:
        self.folder, self.classes, self.overlays = Path(folder), classes, overlays
        owners: dict[str, str] = {}
        for file in files:
            if Path(file).resolve().parent == self.folder.resolve():
                raise ValueError(f"output_dir must be another folder than that of an image, got {self.folder}")
            for name in self.names(file):
                if owners.setdefault(name, file) != file:
                    raise ValueError(f"output_dir: {file} and {owners[name]} would both be written to {name}")
        self.folder.mkdir(parents=True, exist_ok=True)

    def names(self, file: str) -> list[str]:
        """The files of an image: label map and, if wanted, overlay."""
        stem = Path(file).stem
        return [f"{stem}.png", *([f"{stem}_overlay.png"] if self.overlays else [])]

    def write(self, result: Segmented) -> None:
        assert result.image is not None
        assert result.labels is not None
        pictures = [label_image(result.labels, self.classes)]
        if self.overlays:
            pictures.append(overlay(result.image, result.labels, self.classes, title=Path(result.file).stem))
        for name, picture in zip(self.names(result.file), pictures, strict=True):
            with written_whole(self.folder / name) as temporary:
                picture.save(temporary, format="png")


def describe(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


if __name__ == "__main__":
    sys.exit(run_tool(main, SegmentConfig, description=__doc__, positional="images"))
