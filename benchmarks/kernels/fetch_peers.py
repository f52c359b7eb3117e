"""Assemble an ignored folder from which the peers' ordinary decode kernels can be imported.

    python benchmarks/kernels/fetch_peers.py            # about 310 MB of downloads, 6 MB kept in .carry/peers
    PYTHONPATH=.carry/peers:src python benchmarks/kernels/run.py ...

Nothing of it enters the repository: packages come from the package index through pip, and only their pure Python files
are kept, unmodified. vLLM and mamba-ssm import much more than their Triton kernels need (C extensions, platforms,
configuration), so the few modules around the kernels are replaced by the small ones of `STUBS`, written next to them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

VLLM = "0.26.0"
FLA = "0.6.0"
MAMBA_SSM = "2.3.2.post1"  # a source release only; its Triton part needs no build
EINOPS = "0.8.1"
WHEEL_TAGS = ("--python-version=3.12", "--implementation=cp", "--abi=abi3", "--platform=manylinux_2_28_x86_64")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 15 * 2**20

VLLM_MODULES = "vllm/model_executor/layers/mamba/ops/"
VLLM_LINEAR = "vllm/third_party/flash_linear_attention/"
KEPT = {
    "vllm": (
        VLLM_MODULES + "mamba_ssm.py",
        VLLM_MODULES + "triton_helpers.py",
        VLLM_MODULES + "configs/",
        VLLM_LINEAR,
        "vllm/utils/math_utils.py",
    ),
    "fla": ("fla/",),
    "mamba_ssm": ("mamba_ssm/ops/triton/selective_state_update.py", "mamba_ssm/ops/triton/softplus.py"),
    "einops": ("einops/",),
}

STUBS = {
    "vllm/__init__.py": f'__version__ = "{VLLM}"\n',
    "vllm/envs.py": "VLLM_TUNED_CONFIG_FOLDER = None\n",
    "vllm/_custom_ops.py": "",
    "vllm/logger.py": (
        "import logging\n\n\n"
        "class _Logger(logging.LoggerAdapter):\n"
        "    def info_once(self, message, *args, **options):\n"
        "        self.debug(message, *args)\n\n"
        "    def warning_once(self, message, *args, **options):\n"
        "        self.debug(message, *args)\n\n\n"
        "def init_logger(name):\n"
        "    return _Logger(logging.getLogger(name), {})\n"
    ),
    "vllm/platforms/__init__.py": (
        "import torch\n\n\n"
        "class _Platform:\n"
        "    def is_cuda(self):\n        return torch.cuda.is_available()\n\n"
        "    is_cuda_alike = is_cuda\n\n"
        "    def is_rocm(self):\n        return False\n\n"
        "    is_xpu = is_cpu = is_rocm\n\n\n"
        "current_platform = _Platform()\n"
    ),
    "vllm/triton_utils/__init__.py": (
        "import triton\nimport triton.language as tl\nimport triton.language.extra.libdevice as tldevice\n\n"
        "HAS_TRITON = True\nLOG2E = 1.4426950408889634\nLOGE2 = 0.6931471805599453\n"
    ),
    "vllm/utils/__init__.py": "",
    "vllm/utils/platform_utils.py": (
        "import torch\n\n\n"
        "def get_device_name_as_file_name():\n"
        '    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"\n'
        '    return name.replace(" ", "_")\n\n\n'
        "def num_compute_units(device=0):\n"
        "    return torch.cuda.get_device_properties(device).multi_processor_count\n"
    ),
    "vllm/v1/__init__.py": "",
    "vllm/v1/attention/__init__.py": "",
    "vllm/v1/attention/backends/__init__.py": "",
    "vllm/v1/attention/backends/utils.py": "NULL_BLOCK_ID = 0\nPAD_SLOT_ID = -1\n",
    "vllm/third_party/__init__.py": "",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/custom_op.py": (
        "import torch\n\n\n"
        "class CustomOp(torch.nn.Module):\n"
        "    @classmethod\n"
        "    def register(cls, name):\n"
        "        return lambda op: op\n"
    ),
    "vllm/model_executor/layers/__init__.py": "",
    "vllm/model_executor/layers/mamba/__init__.py": "",
    "vllm/model_executor/layers/mamba/ops/__init__.py": "",
    "mamba_ssm/__init__.py": f'__version__ = "{MAMBA_SSM}"\n',
    "mamba_ssm/ops/__init__.py": "",
    "mamba_ssm/ops/triton/__init__.py": "",
}


def download(downloads: Path, requirement: str, *options: str) -> None:
    """One package, without what it depends on."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={downloads}"]
    environment = os.environ | {"MAMBA_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run([*pip, *options, requirement], check=True, env=environment)


def fetch(downloads: Path) -> None:
    """Download whatever is not there yet."""
    wanted = {
        "vllm-": ((f"vllm=={VLLM}", "--only-binary=:all:", *WHEEL_TAGS),),
        "fla_core-": ((f"fla-core=={FLA}", "--only-binary=:all:"),),
        "einops-": ((f"einops=={EINOPS}", "--only-binary=:all:"),),
        # reading the source release's metadata runs its setup.py, which needs torch: that of this environment
        "mamba_ssm-": ((f"mamba-ssm=={MAMBA_SSM}", "--no-binary=:all:", "--no-build-isolation"),),
    }
    for prefix, requirements in wanted.items():
        if not any(downloads.glob(f"{prefix}*")):
            for requirement, *options in requirements:
                print(f"downloading {requirement}", flush=True)
                download(downloads, requirement, *options)


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """(path, content) of every file in a wheel or source release, paths starting at the package."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/"):
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as source:
        for member in source:
            content = source.extractfile(member)
            if content is not None:
                yield member.name.partition("/")[2], content.read()


def unpack(archive: Path, target: Path, kept: tuple[str, ...]) -> None:
    """The kept files of one archive; Python, tables and licences only."""
    for name, content in members(archive):
        licence = "license" in name.lower() and ("dist-info" in name or "/" not in name)
        if licence:
            name = f"licenses/{archive.name.split('-')[0]}/{Path(name).name}"
        elif not (name.startswith(kept) and name.endswith((".py", ".json"))):
            continue
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def assemble(downloads: Path, target: Path) -> None:
    """Fill `target` anew from the archives and the stubs."""
    shutil.rmtree(target, ignore_errors=True)
    for prefix, kept in (("vllm", "vllm"), ("fla_core", "fla"), ("mamba_ssm", "mamba_ssm"), ("einops", "einops")):
        (archive,) = sorted(downloads.glob(f"{prefix}-*"))
        unpack(archive, target, KEPT[kept])
    for name, text in STUBS.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    if size > LIMIT_BYTES:
        raise SystemExit(f"{target} has {size / 2**20:.1f} MiB, more than the {LIMIT_BYTES / 2**20:.0f} meant for it")
    print(f"{target}: {size / 2**20:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ROOT / ".carry" / "peers")
    parser.add_argument("--downloads", type=Path, help="keep (or find) the archives in this folder")
    options = parser.parse_args()
    if options.downloads is not None:
        options.downloads.mkdir(parents=True, exist_ok=True)
        fetch(options.downloads)
        assemble(options.downloads, options.target)
        return
    with tempfile.TemporaryDirectory() as folder:
        fetch(Path(folder))
        assemble(Path(folder), options.target)


if __name__ == "__main__":
    main()
