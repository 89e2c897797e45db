"""The files of the template, made into those of a project of its own."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from hooks.rename import PACKAGE, renamed, renamed_path

# What makes the template a template.
TEMPLATE_ONLY = ["cookiecutter.json", "hooks", "{{cookiecutter.__folder}}", "README.md", "LICENSE"]
TEMPLATE_ONLY += ["docs/cifar10.png", "tests/test_copy.py", "tests/test_front_page.py"]
TEMPLATE_ONLY += ["benchmarks", "tests/test_benchmarks.py"]
TEMPLATE_ONLY += ["docs/reliability.md", "docs/speed.md"]
# Parts that a project can do without.
PARTS = {
    "keep_parity": [
        *(f"tests/{name}.py" for name in ("reference_ddp", "regimes", "step_trace", "mutants")),
        *(f"tests/test_{name}.py" for name in ("parity", "mutants", "devices")),
        "docs/ddp.md",
    ],
    "keep_docs": ["docs", "tests/test_your_project.py"],
    "keep_ci": [".ci", ".github"],
}
MARK = "# template only"  # ends a line that no project gets
# Set where a hook of another repository calls.
ABOUT_ANOTHER = {"GIT_DIR", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"}
ABOUT_ANOTHER |= {"GIT_WORK_TREE"}


def fill(folder: Path, template: Path, answers: Mapping[str, Any]) -> None:
    """Writes the project; makes it a git repository of one commit where git is installed.

    Args:
        folder: of the project.
        answers: to the questions of cookiecutter.json.
    """
    unwanted = [path for key, paths in PARTS.items() if not answers[key] for path in paths]
    paths = [
        path
        for path in template_files(template)
        if not any(_is_in(path, part) for part in [*TEMPLATE_ONLY, *unwanted])
        and not (template / path).is_relative_to(folder)  # made inside of the template
    ]
    in_package = [Path(path) for path in paths if _is_in(path, f"src/{PACKAGE}")]
    modules = {path.parts[2].removesuffix(".py") for path in in_package}
    for path in paths:
        source = template / path
        target = folder / renamed_path(path, answers["package_name"])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content := _own(path, source.read_bytes(), modules, answers))
        # A zip comes without run bits from cookiecutter.
        is_script = content.startswith(b"#!") and not (template / ".git").exists()
        if os.access(source, os.X_OK) or is_script:
            target.chmod(target.stat().st_mode | 0o111)
    _write_licence(folder, template, answers)
    # cruft writes a file of its own afterwards, which belongs into the first commit, too.
    if "_commit" not in answers:
        if shutil.which("git") and not (folder / ".git").exists():
            try:
                _commit(folder, answers)
            except subprocess.CalledProcessError:
                print("The project is whole, but git made no commit of it (see above).")
        start = "pip install -e . && python train.py experiment=quickstart"
        print(f"Begin with: cd {folder.name} && {start}")


def template_files(template: Path) -> list[str]:
    """What git tracks; without git or a repository all that .gitignore does not exclude.

    Raises:
        CalledProcessError: git finds no repository where its files are.
    """
    if shutil.which("git") and (template / ".git").exists():
        # Also of another owner: whose hooks run is trusted.
        listed = _git(template, "-c", "safe.directory=*", "ls-files", "-z").stdout.split("\0")
        return [path for path in listed if (template / path).is_file()]
    return sorted(_not_ignored(template))


def _not_ignored(template: Path) -> Iterator[str]:
    for place, folders, files in os.walk(template):
        here = Path(place).relative_to(template)
        ignored = _ignored(template, here, [*(f"{name}/" for name in folders), *files])
        folders[:] = [name for name in folders if f"{name}/" not in ignored]
        yield from (str(here / name) for name in files if name not in ignored)


def _ignored(template: Path, here: Path, names: list[str]) -> set[str]:
    """Which entries of a folder the template's .gitignore excludes; folders end in a slash."""
    lines = (template / ".gitignore").read_text(encoding="utf-8").splitlines()
    found = {".git", ".git/"}
    for pattern in (line for line in lines if line and not line.startswith("#")):
        if pattern.startswith("!") or "/" in pattern.strip("/"):
            raise ValueError(f".gitignore: {pattern} is for git, and this is no repository of its.")
        if not pattern.startswith("/") or here == Path():
            hits = fnmatch.filter([name.rstrip("/") for name in names], pattern.strip("/"))
            found |= {f"{hit}/" for hit in hits}
            found |= set() if pattern.endswith("/") else {*hits}
    return found


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _own(path: str, content: bytes, modules: set[str], answers: Mapping[str, Any]) -> bytes:
    """A file as it will stand in the project.

    Raises:
        ValueError: Python that is not UTF-8, or cannot be parsed.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        if path.endswith(".py"):
            raise
        return content  # a picture
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    text = "".join(line for line in text[len(mark) :].splitlines(True) if MARK not in line)
    text = mark + renamed(path, text, modules, answers["package_name"])
    return (_own_metadata(text, answers) if path == "pyproject.toml" else text).encode()


def _own_metadata(text: str, answers: Mapping[str, Any]) -> str:
    """pyproject.toml with the project's name, licence and so on."""
    package = answers["package_name"]
    lines = {
        "name": f"name = {_toml(package.replace('_', '-'))}\n",
        "description": f"description = {_toml(answers['description'])}\n",
        "license": f"license = {_toml(answers['license'])}\n",
        "license-files": 'license-files = ["LICENSE"]\n',
        "known-local-folder": f'known-local-folder = ["{package}"]\n',
    }
    if answers["license"] == "none":
        lines |= {"license": "", "license-files": ""}
    if answers["author"]:
        lines["license"] += f"authors = [{{ name = {_toml(answers['author'])} }}]\n"
    for key, line in lines.items():
        text, count = re.subn(rf"^{key} = .*\n", lambda _, line=line: line, text, flags=re.M)
        if count != 1:
            raise ValueError(f"pyproject.toml has {count} lines {key} = ...")
    return text


def _toml(text: str) -> str:
    """A basic string of TOML, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _write_licence(folder: Path, template: Path, answers: Mapping[str, Any]) -> None:
    name = answers["license"]
    if name == "none":
        return
    path = template / ("LICENSE" if name == "MIT" else f"hooks/licences/{name}.txt")
    holder = answers["author"] or f"the authors of {answers['project_name']}"
    line = f"Copyright (c) {date.today().year} {holder}"
    text = re.sub(r"^Copyright \(c\) .*$", lambda _: line, path.read_text("utf-8"), flags=re.M)
    (folder / "LICENSE").write_text(text, "utf-8")


def _commit(folder: Path, answers: Mapping[str, Any]) -> None:
    """Makes the first commit, also for somebody whom git does not know yet."""
    known = {"name": answers["author"] or answers["project_name"], "email": "nobody@localhost"}
    identity = []
    for key, value in known.items():
        if _git(folder, "config", f"user.{key}", check=False).returncode:
            identity += ["-c", f"user.{key}={value}"]
    _git(folder, "-c", "init.defaultBranch=main", "init", "--quiet")
    _git(folder, "-c", "core.safecrlf=false", "add", "--all", "--force")  # all of it is ours
    alone = ["-c", "commit.gpgsign=false", "-c", f"core.hooksPath={os.devnull}"]
    _git(folder, *identity, *alone, "commit", "--quiet", "--message=Start from the template")


def _git(folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs git in a folder.

    Raises:
        CalledProcessError: it failed, and its words are on the console.
    """
    return subprocess.run(
        ["git", *words],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key not in ABOUT_ANOTHER},
        stdout=subprocess.PIPE,
        stderr=None if check else subprocess.DEVNULL,
        check=check,
        encoding="utf-8",
        errors="surrogateescape",
    )
