"""A script of benchmarks/ without a GPU, every peer's kernel interpreted: `dry_run.py kernels ...` or `steps ...`.

Run as a script itself, so that the stand-ins among the peers' modules stay out of the tests' own process.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests import interpreter  # noqa: E402

interpreter.switch_on()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def exp(x):
    return tl.exp(x)


if __name__ == "__main__":
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent

    # the module took tl.exp before the interpreter put its own in place
    fused_recurrent.exp = exp
    _, folder, *arguments = sys.argv
    script = ROOT / "benchmarks" / folder / "run.py"
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
