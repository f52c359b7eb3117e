"""ReplaySSM: decode hybrid language models without rewriting their recurrent state at every token."""

from replayssm.attach import attach, detach, supported_families
from replayssm.config import ReplayConfig

__version__ = "0.1.0"
__all__ = ["ReplayConfig", "__version__", "attach", "detach", "supported_families"]
