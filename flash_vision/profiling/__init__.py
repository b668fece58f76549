"""MACs, parameters, throughput and memory of any timm model."""
