"""Training: run configuration, data, the loop, checkpoints, evaluation. Works on any timm model."""
