"""Checkpoints: whole fp32 tensors in safetensors files, written beside training, read by any world size."""
