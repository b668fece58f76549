"""Detection and segmentation on any timm backbone, trained through the loop of `flash_vision.train`."""
