"""Nothing."""

from torchvision.transforms.v2 import functional
