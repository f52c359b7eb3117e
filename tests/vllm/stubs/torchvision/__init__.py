"""Stands for torchvision, whose wheels do not import beside the CPU build of torch: text models never call it."""

from torchvision import io, transforms

globals()["__version__"] = "0.28"
