"""lorafleet: multi-LoRA serving for a cluster of GPUs. The code lives in the subpackages this folder links to."""

__version__ = "0.1.0"
