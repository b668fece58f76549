"""Segments images: python tools/segment.py --checkpoint FILE --output_dir DIR IMAGE_OR_FOLDER...

Writes NAME.png (class numbers as in the data set's label maps, with the palette), NAME_overlay.png (classes over the
image, with a legend) and results.json (share of each class, in [0, 1]). With --labels FOLDER it prints mean
intersection over union, accuracies and a table per class.
"""

import dataclasses
import json
import sys
from pathlib import Path

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


def main(config: SegmentConfig) -> None:
    loaded = load_configured(config)
    classes = loaded.sidecar.class_set
    comparison = Comparison(config.labels, classes) if config.labels else None
    outputs = Outputs(config.output_dir, classes, overlays=config.overlays) if config.output_dir else None
    records = []
    for result in segment(config, loaded):
        record = as_record(result, classes)
        if result.labels is not None:
            if comparison:
                comparison.add(result)
            if outputs:
                outputs.write(result)
        records.append(record)
        if not comparison:
            print(record["file"], record.get("error") or describe(record["shares"]), sep="\t")
    content = {"checkpoint": config.checkpoint, "network": dataclasses.asdict(loaded.sidecar), "images": records}
    if comparison:
        scores, table = comparison.confusion.scores(), comparison.confusion.table(classes.names)
        content |= {"scores": scores, "per_class": table}
        print(format_table(table))
        print(f"{comparison.images} images: " + ", ".join(f"{name} {value:.2f}" for name, value in scores.items()))
    if failed := sum("error" in record for record in records):
        print(f"{failed} of {len(records)} files could not be read", file=sys.stderr)
    if outputs:
        write_text(outputs.folder / "results.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


class Outputs:
    """The files of each image in one folder; two images of one name are refused."""

    def __init__(self, folder: str, classes: ClassSet, *, overlays: bool) -> None:
        self.folder, self.classes, self.overlays = Path(folder), classes, overlays
        self.folder.mkdir(parents=True, exist_ok=True)
        self.names: dict[str, str] = {}

    def write(self, result: Segmented) -> None:
        assert result.image is not None
        assert result.labels is not None
        name = Path(result.file).stem
        if Path(result.file).resolve().parent == self.folder.resolve():
            raise ValueError(f"output_dir must be another folder than that of an image, got {self.folder}")
        if name in self.names:
            raise ValueError(f"{result.file}: has the name of {self.names[name]}, output_dir can hold one of them")
        self.names[name] = result.file
        pictures = {f"{name}.png": label_image(result.labels, self.classes)}
        if self.overlays:
            pictures[f"{name}_overlay.png"] = overlay(result.image, result.labels, self.classes, title=name)
        for file, picture in pictures.items():
            with written_whole(self.folder / file) as temporary:
                picture.save(temporary, format="png")


def describe(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


if __name__ == "__main__":
    sys.exit(run_tool(main, SegmentConfig, description=__doc__, positional="images"))
