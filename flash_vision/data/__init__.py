"""Data sets on disk: class folders and WebDataset shards."""
