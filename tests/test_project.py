"""The repository itself: its size, its version, its README, and what must not be in it."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import replayssm

ROOT = Path(__file__).resolve().parents[1]
TREE_LIMIT_BYTES = 24 * 1000**2


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """Every file that git tracks or would add, so that a fault shows before it is committed."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    paths = (ROOT / name for name in listing.decode().split("\0") if name)
    return sorted({path for path in paths if path.is_file()})


def test_tree_is_small(tracked: list[Path]) -> None:
    total = sum(path.stat().st_size for path in tracked)
    largest = sorted(tracked, key=lambda path: path.stat().st_size)[-3:]
    assert total < TREE_LIMIT_BYTES, f"{total} bytes are tracked; the largest files: {largest}"


@pytest.mark.parametrize("page", ["README.md", "docs/design.md", "docs/vllm.md", "docs/numerics.md"])
def test_files_that_the_docs_name_exist(page: str) -> None:
    """Experiments are history, and may name what is gone."""
    named = set(re.findall(r"\b(?:[a-z_0-9]+/)+[a-z_0-9]+\.py\b", (ROOT / page).read_text()))
    folders = (ROOT, ROOT / "src" / "replayssm")
    assert not sorted(name for name in named if not any((folder / name).is_file() for folder in folders))


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md", "CONTRIBUTING.md"])
def test_it_is_installed_from_its_folder(page: str) -> None:
    """No index has the package, so its name alone installs nothing where it is not there yet."""
    wanted = re.findall(r"pip install '?([^'`\s]+)", (ROOT / page).read_text())
    assert not [each for each in wanted if not each.startswith(".")]


def test_no_machine_paths(tracked: list[Path]) -> None:
    """No absolute path of somebody's machine. A bundled model's vocabulary is data and may hold anything."""
    pattern = re.compile(r"(?<![\w./-])/" + r"(?:work|root|home|Users)" + r"/[\w.-]")
    found = []
    for path in tracked:
        if path.name == "tokenizer.json":
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights, images
        found += [f"{path.relative_to(ROOT)}: {hit.group()}" for hit in pattern.finditer(text)]
    assert not found


FLOORS = (
    {"models"},
    {"recurrences"},
    {"config", "state"},
    {"kernels"},
    {"flow"},
    {"attach"},
    {"decode", "evaluate"},
    {"planner"},
    {"bench"},
    {"cli"},
)
"""Parts of the package; each imports those on floors before its own."""


def test_imports_go_one_way() -> None:
    package = ROOT / "src" / "replayssm"
    floors = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    wrong = []
    for path in sorted(package.rglob("*.py")):
        part = path.relative_to(package).parts[0].removesuffix(".py")
        if part.startswith("__"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports relatively"
                names = [str(node.module)]
            for taken in (name.split(".")[1] for name in names if name.startswith("replayssm.")):
                if taken != part and floors[taken] >= floors[part] and {taken, part} != {"config", "state"}:
                    wrong.append(f"{path.relative_to(package)} imports {taken}")
    assert not wrong


def test_version_has_one_home(tracked: list[Path]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/replayssm/__init__.py"
    stated = re.compile(r"^__version__ *=", re.MULTILINE)
    homes = [path for path in tracked if path.suffix == ".py" and stated.search(path.read_text())]
    assert homes == [ROOT / "src/replayssm/__init__.py"]
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", replayssm.__version__)


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    wanted = [requirement for group in [*groups, project["build-system"]["requires"]] for requirement in group]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in pins if line and not line.startswith("#")}
    assert {re.match(r"[\w-]+", requirement).group() for requirement in wanted} <= pinned
    assert any(re.fullmatch(r"torch==.*\+cpu", line) for line in pins), "an open pin may bring a CUDA build"


def _python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readme_examples_run() -> None:
    """The blocks run in order in one namespace, as a reader would type them."""
    blocks = _python_blocks((ROOT / "README.md").read_text())
    assert blocks, "README.md has no python example"
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"README.md, python block {number}", "exec"), namespace)
