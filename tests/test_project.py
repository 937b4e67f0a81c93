"""The project around the code: what is installed, what the documents promise, who may import whom."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import flexops
from flexops import kernels as fk

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PAGES = ("README.md", "CONTRIBUTING.md")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def user_environment() -> dict[str, str]:
    """As a user's shell has it: without what the tests set for Triton."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def test_constraints_agree_with_the_ranges():
    versions = pins()
    groups = [PROJECT["dependencies"], EXTRAS["dev"], EXTRAS["serve"]]
    requirements = [Requirement(text) for group in groups for text in group]
    for requirement in requirements:
        if requirement.name in versions:
            assert versions[requirement.name] in requirement.specifier, requirement
    assert {"torch", "triton", "transformers", "numba", "numpy"} <= versions.keys()


def test_extras():
    assert {"cuda", "fast", "serve", "train", "ray", "demo", "dev"} <= EXTRAS.keys()
    assert next(r for r in PROJECT["dependencies"] if r.startswith("triton")).endswith("sys_platform == 'linux'")


def test_wheel_holds_the_package_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "flexops", source / "flexops", ignore=ignored)
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(source)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("flexops-*.whl")
    assert wheel.name.startswith(f"flexops-{flexops.__version__}-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        assert "flexops = flexops.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    files = {str(p.relative_to(source)) for p in (source / "flexops").rglob("*") if p.is_file()}
    assert {name for name in names if not name.startswith(info)} == files


def test_works_without_triton():
    """As on macOS: no triton to import; the model runs and generates."""
    code = """
import sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTriton())
import torch
import flexops.cli
from flexops.runtime import Engine, SamplingParams
from tests import tiny
*_, last = Engine(tiny.make_model()).stream([5, 6, 7], SamplingParams(max_new_tokens=3))
assert len(last.token_ids) == 3 and "triton" not in sys.modules
print("generated")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=user_environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("generated\n"), done.stderr


# Who may import whom at the top of a file; inside functions the model reaches `generation` (DESIGN §9)
MAY_IMPORT = {
    "kernels": {"kernels"},
    "config": set(),
    "text": set(),
    "models": {"models", "kernels", "config"},
    "runtime": {"runtime", "models", "kernels", "config"},
    "processors": {"runtime", "models", "kernels", "config"},
    "generation": {"processors", "runtime", "models", "kernels", "config"},
    "cli": {"generation", "runtime", "models", "kernels", "config", "text", "flexops"},
}


def rooms_imported(path: Path) -> set[str]:
    """The parts of the package that a file imports at its top level."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = base + (node.module.split(".") if node.module else [])
            names = [[*module, alias.name] for alias in node.names] if module == ["flexops"] else [module]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "flexops" and len(name) > 1}
    rooms = {p.stem for p in (ROOT / "flexops").iterdir()}
    return {name if name in rooms else "flexops" for name in found}


def test_every_room_is_known():
    folder = ROOT / "flexops"
    rooms = {p.stem for p in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/__init__.py")}
    assert rooms - {"__init__"} == MAY_IMPORT.keys()


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_run_one_way(room):
    single = ROOT / "flexops" / f"{room}.py"
    files = [single] if single.exists() else list((ROOT / "flexops" / room).rglob("*.py"))
    for path in files:
        assert rooms_imported(path) <= MAY_IMPORT[room], path


def readme_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", readme_examples(), ids=["operators", "training", "generate", "cache"])
def test_examples_in_the_readme_run(code):
    with fk.backend("cpu"):
        exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_what_exists(page):
    text = (ROOT / page).read_text()
    files = set(re.findall(r"\]\(([\w./-]+)\)", text))
    files |= set(re.findall(r"`((?:flexops|examples|tests|bench)/[\w./-]+)`", text))
    assert [name for name in files if not (ROOT / name).exists()] == []
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"^make .*$|`make [^`]*`", text, re.MULTILINE)
    assert {name for command in commands for name in re.findall(r"make ([\w-]+)", command)} <= targets


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_demo_and_test_begin_with_the_environment(tmp_path):
    """In a fresh clone: both first make .venv, with the pinned versions."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for target, last in (("demo", ".venv/bin/flexops generate"), ("test", ".venv/bin/python -m pytest")):
        command = ["make", "--dry-run", target, "PYTHON=python3"]
        plan = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        assert plan.index("python3 -m venv .venv") < plan.index("--constraint constraints.txt") < plan.index(last)


def test_ci_runs_the_checks():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "setup lint types test" in script.read_text()
