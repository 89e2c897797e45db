"""A project made from this repository is whole and has its own name; cruft updates it."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hooks.copying import MARK, PARTS, TEMPLATE_ONLY, _not_ignored, template_files
from hooks.names import LONGEST, suggestion, unfit
from hooks.rename import renamed
from packaging.requirements import Requirement

from conftest import REPOSITORY

NASTY = 'Says "hi", it\'s <b>50\u00a0%</b> of \\ # ü, src/project, project.model, {x}\u3000日本'
# Projects to make: name, package, other answers. All eight choices of parts are among them.
COPIES: dict[str, tuple[str, dict[str, str]]] = {
    "My Project": ("my_project", {}),
    "my-net": ("my_net", {"keep_parity": "no", "license": "Apache-2.0", "author": 'J. "J" Döe'}),
    "Nets": ("other", {"keep_docs": "no", "package_name": "other", "license": "BSD-3-Clause"}),
    "a.ai": ("a_ai", {"keep_ci": "no", "license": "none", "description": NASTY}),
    "Zürich Élan": ("zurich_elan", {"keep_parity": "no", "keep_docs": "no"}),
    "x": ("x", {"keep_docs": "no", "keep_ci": "no", "author": "X"}),
    "y" * LONGEST: ("y" * LONGEST, {"keep_parity": "no", "keep_ci": "no"}),
    "Same": ("project", {"package_name": "project", **dict.fromkeys(PARTS, "no")}),
}
# Which of our tests they lack: always, and without a part.
LACKING = {"tests/test_benchmarks.py", "tests/test_copy.py", "tests/test_front_page.py"}
LACKING_WITHOUT = {
    "keep_parity": {"tests/test_parity.py", "tests/test_mutants.py", "tests/test_devices.py"},
    "keep_docs": {"tests/test_your_project.py"},
    "keep_ci": set(),
}
in_every_copy = pytest.mark.parametrize("name", COPIES)


def done(*words: Any, at: Path, check: bool = True, **variables: str) -> str:
    """What a command says, of which git and cookiecutter do not know the caller."""
    known = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    ran = subprocess.run(
        [*map(str, words)],
        cwd=at,
        env={**known, "HOME": str(at), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert not check or ran.returncode == 0, ran.stdout
    return ran.stdout


def make(template: Any, place: Path, name: str, /, **answers: str) -> Path:
    """The folder of a new project; in `place` alone."""
    place.mkdir(parents=True, exist_ok=True)
    words = [f"project_name={name}", *(f"{key}={value}" for key, value in answers.items())]
    words = [sys.executable, "-m", "cookiecutter", template, "--no-input", *words]
    said = done(*words, at=place)
    made = [path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert len(made) == 1, said
    return made[0]


def commit(folder: Path) -> None:
    for words in ["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]:
        done("git", "-c", "user.name=N", "-c", "user.email=E", *words, at=folder)


def texts(folder: Path) -> dict[str, bytes]:
    """All files but git's, by path."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    not_ours = re.compile(r"/(\.git|__pycache__|\.cookiecutter_replay)/")
    paths = [path for path in paths if not not_ours.search(str(path))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def executables(folder: Path) -> set[str]:
    return {path for path in texts(folder) if os.access(folder / path, os.X_OK)}


@pytest.fixture(scope="session")
def template(tmp_path_factory: Any) -> Path:
    """This repository as somebody gets it, with files as they stand."""
    folder = tmp_path_factory.mktemp("template") / "project"
    for path in template_files(REPOSITORY):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, folder / path)
    commit(folder)
    return folder


@pytest.fixture(scope="session")
def copies(template: Path, tmp_path_factory: Any) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("copies")
    return {
        name: make(template, place / package, name, **answers)
        for name, (package, answers) in COPIES.items()
    }


# What a project holds


@in_every_copy
def test_all_files_are_there_but_the_templates_and_those_not_wanted(copies, name):
    package, answers = COPIES[name]
    unwanted = [p for part, paths in PARTS.items() if answers.get(part) == "no" for p in paths]
    left_out = [*TEMPLATE_ONLY, *unwanted]
    expected = {
        re.sub("^src/project/", f"src/{package}/", path)
        for path in template_files(REPOSITORY)
        if not any(path == part or path.startswith(f"{part}/") for part in left_out)
    }
    licence = {"LICENSE"} if answers.get("license") != "none" else set()
    found = texts(copies[name]).keys()
    assert found == expected | {"README.md"} | licence
    ours = {f"tests/{path.name}" for path in REPOSITORY.glob("tests/test_*.py")}
    lacking = [LACKING_WITHOUT[part] for part in PARTS if answers.get(part) == "no"]
    assert ours - found == LACKING.union(*lacking)


def test_each_part_that_can_be_left_out_exists():
    for path in [*TEMPLATE_ONLY, *(path for paths in PARTS.values() for path in paths)]:
        assert (REPOSITORY / path).exists(), path


def words(text: bytes) -> int:
    """How often the word stands for no package."""
    text = re.sub(rb"src/project|\bproject\.\w|(from|import) project\b", b"", text)
    return len(re.findall(rb"\bproject\b", text))


@in_every_copy
def test_nothing_else_has_changed(copies, name):
    package = COPIES[name][0]
    for path, content in texts(copies[name]).items():
        if path in ("README.md", "LICENSE", "pyproject.toml"):
            continue
        own = (REPOSITORY / path.replace(f"src/{package}/", "src/project/")).read_bytes()
        kept = [line for line in own.split(b"\n") if MARK.encode() not in line]
        assert content.count(b"\n") + 1 == len(kept), path
        assert words(content) == words(b"\n".join(kept)), path
        if package not in ("x", "other"):  # which are words
            assert content.replace(package.encode(), b"project") == b"\n".join(kept), path


@pytest.mark.parametrize("name", [name for name in COPIES if name != "Same"])
def test_the_old_name_is_nowhere(copies, name):
    modules = "|".join(path.stem for path in (REPOSITORY / "src/project").glob("*.py"))
    for path, content in texts(copies[name]).items():
        if path.endswith(".png"):
            continue
        text = (
            content.decode()
            .replace(NASTY, "")
            .replace(json.dumps(NASTY, ensure_ascii=False)[1:-1], "")
        )
        assert not re.search(rf"\bproject\.({modules})\b|src/project|-m project", text), path
        if path.endswith(".py"):
            nodes = [*ast.walk(ast.parse(content))]
            found = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
            found |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
            assert "project" not in {str(module).split(".")[0] for module in found}, path
            assert not any(isinstance(n, ast.Name) and n.id == "project" for n in nodes), path


@in_every_copy
def test_metadata_and_licence_are_its_own(copies, name):
    tomllib = pytest.importorskip("tomllib")
    package, answers = COPIES[name]
    own = tomllib.loads((copies[name] / "pyproject.toml").read_text())
    about = own["project"]
    assert about["name"] == package.replace("_", "-")
    assert about["description"] == answers.get("description", "Image classifiers under DDP")
    assert about.get("authors", [{}])[0].get("name", "") == answers.get("author", "")
    licence = answers.get("license", "MIT")
    assert about.get("license", "none") == licence
    assert own["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [f"src/{package}"]
    if licence == "none":
        assert "license-files" not in about
        return
    words = {"MIT": "MIT License", "Apache-2.0": "Apache License", "BSD-3-Clause": "BSD 3-Clause"}
    text = (copies[name] / "LICENSE").read_text()
    assert words[licence] in text
    if licence != "Apache-2.0":
        holder = answers.get("author", f"the authors of {name}")
        assert f"\nCopyright (c) {date.today().year} {holder}\n" in text
        assert text.count("Copyright (c)") == 1


@in_every_copy
def test_the_readme_is_its_own(copies, name):
    package, answers = COPIES[name]
    page = (copies[name] / "README.md").read_text()
    assert page.startswith(f"# {name}\n\n{answers.get('description', 'Image classifiers')}")
    assert "pip install -e . && python train.py experiment=quickstart" in page
    assert f"python -m {package}.env" in page
    assert "{{" not in page
    assert "{%" not in page
    assert len(page.splitlines()) < 70
    for link in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (copies[name] / link).exists()
    for part, word in ("keep_ci", ".ci/run"), ("keep_docs", "docs/"), ("keep_parity", "reference"):
        if answers.get(part) == "no":
            assert word not in page


@in_every_copy
def test_ruff_finds_nothing(copies, name):
    for command in ["check", "--no-cache"], ["format", "--check", "--no-cache"]:
        done(sys.executable, "-m", "ruff", *command, ".", at=copies[name])


@in_every_copy
def test_it_is_a_repository_of_one_commit(copies, name):
    assert done("git", "rev-list", "--count", "HEAD", at=copies[name]) == "1\n"
    assert done("git", "status", "--porcelain", at=copies[name]) == ""


# Its tests

COLLECT = """
import os, sys
import lightning, matplotlib, pytest, torch, torchmetrics, torchvision
import tensorboard.backend.event_processing.event_accumulator
for folder in sys.argv[1:]:
    if os.fork() == 0:
        os.chdir(folder)
        sys.path.insert(0, "src")
        status = pytest.main(["--collect-only", "-qm", "slow or not slow", "-pno:cacheprovider"])
        print("status", int(status), folder)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def collected(copies, tmp_path_factory) -> dict[str, list[str]]:
    """The ids of the tests of each project, and of this one ("")."""
    folders = {"": REPOSITORY, **copies}
    place = tmp_path_factory.mktemp("collected")
    path = os.pathsep.join(p for p in sys.path if not Path(p).is_relative_to(REPOSITORY))
    said = done(sys.executable, "-c", COLLECT, *folders.values(), at=place, PYTHONPATH=path)
    parts = re.split(r"status (\d) .*\n", said)
    assert parts[1::2] == ["0"] * len(folders), said
    return {
        name: [line for line in part.splitlines() if "::" in line]
        for name, part in zip(folders, parts[::2], strict=False)
    }


@pytest.mark.slow
@in_every_copy
def test_its_tests_are_ours_but_those_of_files_left_out(collected, copies, name):
    def functions(ids: list[str]) -> set[str]:
        return {line.split("[")[0] for line in ids}

    def is_kept(line: str) -> bool:
        return (copies[name] / line.split("::")[0]).exists()

    assert functions(collected[name]) == {*filter(is_kept, functions(collected[""]))}
    gone = {line.split("::")[0] for line in collected[""] if not is_kept(line)}
    answers = COPIES[name][1]
    assert gone == LACKING.union(*(LACKING_WITHOUT[p] for p in PARTS if answers.get(p) == "no"))


@pytest.mark.slow
def test_the_default_project_has_each_case_of_ours(collected):
    def cases(ids: list[str]) -> set[str]:
        # Those of the README are commands, of which a project has its own.
        others = re.compile("tests/test_(copy|benchmarks|front_page|readme)|.*_of_the_pages")
        return {line for line in ids if not others.match(line)}

    own = {line.replace("my_project.", "project.") for line in collected["My Project"]}
    assert cases([*own]) == cases(collected[""])
    assert len(own) > 1000


# Names


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("my-net", "my_net"),
        ("My Net", "my_net"),
        ("a.ai", "a_ai"),
        ("Crème Brûlée", "creme_brulee"),
        ("Straße 9", "strasse_9"),
        ("CamelCase", "camelcase"),
        ("  a  b  ", "a_b"),
        ("it's", "it_s"),
    ],
)
def test_a_name_gives_a_package(template, tmp_path, name, package):
    folder = make(template, tmp_path, name)
    assert [path.name for path in (folder / "src").iterdir()] == [package]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (["project_name=class"], "'class' is a keyword of Python. Try package_name=my_class."),
        (["project_name=3D Net"], "'3d_net' begins with a digit. Try package_name=my_3d_net."),
        (["project_name="], "holds no letter or digit"),
        (["project_name=..."], "holds no letter or digit"),
        (["project_name=Email"], "a module of Python's. Try package_name=my_email."),
        (["project_name=Torch"], "this project needs. Try package_name=my_torch."),
        (["project_name=PyTorch-Lightning"], "needs. Try package_name=my_pytorch_lightning."),
        (["project_name=Train"], "a module beside the package. Try package_name=my_train."),
        (["project_name=a", "package_name=My Pkg"], "Try package_name=my_pkg."),
        (["project_name=a", "package_name=été"], "Try package_name=ete."),
        (["project_name=a", "package_name="], "is empty"),
        (["project_name=" + "long " * 9], "longer than 30 characters. Try package_name=long_"),
        (["project_name=Type"], "'type' is a keyword of Python. Try package_name=my_type."),
        (["project_name=Test"], "a module of Python's. Try package_name=my_test."),
        (["project_name=a", "package_name=net_"], "Try package_name=net."),
        (["project_name=a", "package_name=hydra__core"], "Try package_name=my_hydra_core."),
        (["project_name=" + "long" * 30, "package_name=a"], "longer than 100 characters"),
        (["project_name=a", "description=b\nc"], "description holds '\\n', which cannot be kept"),
    ],
)
def test_a_name_that_cannot_be_is_refused_before_a_file_is_written(
    template, tmp_path, answers, words
):
    said = done(
        *(sys.executable, "-m", "cookiecutter", template, "--no-input", *answers),
        at=tmp_path,
        check=False,
    )
    assert words in said
    assert len(said.splitlines()) == 1
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


@pytest.mark.parametrize("name", ["class", "3d", "", "json", "torch", "é", "深", "laws", "a__b"])
def test_what_is_suggested_is_fit(name):
    assert unfit(name)
    assert unfit(suggestion(name)) is None


def test_no_package_that_comes_with_ours_can_be_shadowed():
    lines = (REPOSITORY / "pyproject.toml").read_text().splitlines()
    only = {
        Requirement(line.split('"')[1]).name for line in lines if re.match(f' +".+{MARK}', line)
    }
    assert only == {"cookiecutter", "cruft", "hooks", "benchmarks"}
    todo = [r for r in map(Requirement, metadata.requires("project") or []) if r.name not in only]
    found: set[str] = set()
    while todo:
        asked = todo.pop()
        name = re.sub(r"[-_.]+", "-", asked.name).lower()
        if f"{name}{asked.extras}" in found:
            continue
        found |= {name, f"{name}{asked.extras}"}
        try:
            needs = [*map(Requirement, metadata.requires(name) or [])]
        except metadata.PackageNotFoundError:  # for another system
            continue
        extras = [{"extra": extra} for extra in ["", *asked.extras]]
        todo += [r for r in needs if not r.marker or any(map(r.marker.evaluate, extras))]
    imports = metadata.packages_distributions().items()
    named = {i for i, dists in imports if found & {re.sub("[-_.]+", "-", d).lower() for d in dists}}
    named |= {name.replace("-", "_") for name in found}
    assert len(named) > 80
    assert {name.lower() for name in named if unfit(name.lower()) is None} == set()


# Where it comes from


@pytest.fixture(scope="session")
def default(copies: dict[str, Path]) -> Path:
    return copies["My Project"]


@pytest.mark.parametrize("form", ["relative", "url", "zip"])
def test_a_path_a_url_and_a_zip_give_the_same(template, default, tmp_path, form):
    archive = tmp_path / "main.zip"
    done("git", "archive", "--prefix=project-main/", "-o", archive, "HEAD", at=template)
    here = tmp_path / "deep/er/here"  # whence a relative path leads nowhere from the template
    relative = os.path.relpath(template, here)
    assert not (template / relative).exists()
    place = {"relative": relative, "url": f"git+file://{template}", "zip": archive}[form]
    made = make(place, here, "My Project")
    assert texts(made) == texts(default)
    assert executables(made) == executables(default) == {".ci/run"}


def test_it_can_be_made_inside_of_the_template(template, default, tmp_path):
    shutil.copytree(template, tmp_path / "template")
    words = "-m", "cookiecutter", ".", "--no-input", "project_name=My Project"
    done(sys.executable, *words, at=tmp_path / "template", PATH="")
    assert texts(tmp_path / "template/my-project") == texts(default)


@pytest.mark.parametrize("lacks", ["git", "git of a worktree", "a repository", "one of its own"])
def test_without_git_it_is_the_same_and_nothing_ignored_comes_along(
    template, default, tmp_path, monkeypatch, lacks
):
    place = shutil.copytree(template, tmp_path / "around/template")
    if not lacks.startswith("git"):
        shutil.rmtree(place / ".git")
    if lacks == "git of a worktree":
        (place / ".git").rename(tmp_path / "git")
        (place / ".git").write_text(f"gitdir: {tmp_path}/git\n")
    if lacks == "one of its own":
        done("git", "init", "-q", at=tmp_path / "around")
    for path in "data/a/b", "outputs/x/y.log", "src/project/__pycache__/z.pyc", ".venv/bin/python":
        (place / path).parent.mkdir(parents=True)
        (place / path).write_text("x")
    (place / "build").write_text("a file; .gitignore is about a folder")
    if lacks.startswith("git"):
        monkeypatch.setenv("PATH", str(tmp_path))
    made = make(place, tmp_path / "here", "My Project")
    assert texts(made) == texts(default) | {"build": (place / "build").read_bytes()}
    assert (made / ".git").exists() == (not lacks.startswith("git"))


def test_without_git_the_same_files_are_found_as_by_git(template):
    assert {*_not_ignored(template)} == {*template_files(template)}
    assert len(template_files(template)) > 100


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_of_another_owners_repository_it_is_what_is_tracked(template, default, tmp_path):
    place = shutil.copytree(template, tmp_path / "theirs")
    (place / ".env").write_text("SECRET")
    done("chown", "-R", "12345", place, at=tmp_path)
    assert texts(make(place, tmp_path / "here", "My Project")) == texts(default)


def test_what_is_no_text_of_ours_arrives_as_it_was(template, tmp_path):
    strange = shutil.copytree(template, tmp_path / "strange")
    files = {
        "windows.txt": b"project.model\r\n{{ x }} ${{ y }} {% z %}\r\n",
        "latin.txt": b"\xe9 project.model\n",
        "mark.py": b"\xef\xbb\xbfimport project\n",
        "raw.bin": bytes(range(256)) + b"project.model",
        "no newline.md": b"project.model",
        "f\u00fcr/run.sh": b"#!/bin/sh\necho project\n",
        "tool": b"project",
    }
    for path, content in files.items():
        (strange / path).parent.mkdir(exist_ok=True)
        (strange / path).write_bytes(content)
    (strange / "tool").chmod(0o755)
    (strange / "f\u00fcr/run.sh").chmod(0o755)
    done("git", "add", "-A", at=strange)
    made = make(strange, tmp_path / "here", "Net")
    renamed = {"windows.txt", "no newline.md", "mark.py"}
    for path, content in files.items():
        expected = content.replace(b"project", b"net") if path in renamed else content
        assert (made / path).read_bytes() == expected, path
    assert executables(made) == {".ci/run", "tool", "f\u00fcr/run.sh"}


def test_a_folder_with_files_is_left_alone(template, tmp_path):
    mine = tmp_path / "mine"
    (mine / "src").mkdir(parents=True)
    (mine / "README.md").write_text("mine")
    words = "-m", "cookiecutter", template, "--no-input", "-f", "-s", "project_name=mine"
    said = done(sys.executable, *words, at=tmp_path, check=False)
    assert "mine is not empty (README.md), nothing was written there" in said
    assert texts(mine) == {"README.md": b"mine"}


def test_somebodys_own_git_settings_do_not_get_in_the_way(template, tmp_path):
    refuses = tmp_path / ".hooks/pre-commit"
    refuses.parent.mkdir()
    refuses.write_text("#!/bin/sh\nexit 1\n")
    refuses.chmod(0o755)
    settings = f"[commit]\ngpgsign=true\n[core]\nhooksPath={tmp_path}/.hooks\n"
    (tmp_path / ".gitconfig").write_text(f"[user]\nname=Jane\nemail=j@x\n{settings}")
    made = make(template, tmp_path, "Net")
    assert done("git", "log", "--format=%an %ae", at=made) == "Jane j@x\n"
    assert done("git", "branch", "--show-current", at=made) == "main\n"
    (tmp_path / ".gitconfig").write_text(settings)
    made = make(template, tmp_path / "unknown", "Net", author="Jané D")
    assert done("git", "log", "--format=%an", at=made) == "Jané D\n"


@pytest.mark.parametrize("settings", ["[user]\nname=\nemail=x", "[core]\nexcludesFile=~/.ignored"])
def test_git_can_lose_nothing(template, default, tmp_path, settings):
    (tmp_path / ".gitconfig").write_text(settings)
    (tmp_path / ".ignored").write_text("docs\n*.py\n")
    words = "-m", "cookiecutter", template, "--no-input", "project_name=My Project"
    said = done(sys.executable, *words, at=tmp_path)
    assert texts(tmp_path / "my-project") == texts(default)
    if "excludes" in settings:
        tracked = done("git", "ls-files", "-z", at=tmp_path / "my-project").split("\0")[:-1]
        assert {*tracked} == texts(default).keys()
    else:
        assert "git made no commit of it" in said


def test_another_repository_whose_hook_calls_has_no_part_in_it(template, default, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("x")
    commit(other)
    where: Any = {"at": tmp_path, "GIT_DIR": str(other / ".git"), "GIT_WORK_TREE": str(other)}
    words = "-m", "cookiecutter", template, "--no-input", "project_name=My Project"
    done(sys.executable, *words, GIT_INDEX_FILE=str(other / ".git/index"), **where)
    assert texts(tmp_path / "my-project") == texts(default)
    for folder in other, tmp_path / "my-project":
        assert done("git", "rev-list", "--count", "HEAD", at=folder) == "1\n"


def test_a_repository_that_is_there_gets_the_files_and_no_commit(template, default, tmp_path):
    mine = tmp_path / "my-project"
    mine.mkdir()
    done("git", "init", "-q", at=mine)
    words = "-m", "cookiecutter", template, "--no-input", "-f", "project_name=My Project"
    done(sys.executable, *words, at=tmp_path)
    assert texts(mine) == texts(default)
    assert done("git", "rev-list", "--all", "--count", at=mine) == "0\n"


# Later versions of the template


def test_an_update_brings_what_is_new_and_leaves_what_is_ones_own(template, tmp_path):
    upstream = shutil.copytree(template, tmp_path / "upstream")
    cruft = sys.executable, "-m", "cruft"
    answers = json.dumps({"project_name": "My Net", "keep_ci": False})
    done(*cruft, "create", upstream, "--no-input", "--extra-context", answers, at=tmp_path)
    mine = tmp_path / "my-net"
    assert not (mine / ".git").exists()
    assert (mine / ".cruft.json").exists()
    commit(mine)
    # Its owner works on it,
    model, readme, own = (mine / path for path in ("src/my_net/model.py", "README.md", "own.py"))
    model.write_text(model.read_text() + "\n\nMINE = 1\n")
    readme.write_text("# Mine, and no template's\n")
    own.write_text("from project import mine\n")
    (mine / "conf/experiment/tutorial.yaml").unlink()
    commit(mine)
    # the template goes on,
    new = "from project import model\nfrom project.errors import UserError\n"
    (upstream / "src/project/brand_new.py").write_text(new)
    (upstream / "conf/model/new.yaml").write_text("_target_: project.brand_new.Net\n")
    first = (upstream / "src/project/model.py").read_text()
    (upstream / "src/project/model.py").write_text(first.replace('"""', '"""Better: ', 1))
    (upstream / "conf/trainer/gpu.yaml").unlink()
    tutorial = upstream / "conf/experiment/tutorial.yaml"
    tutorial.write_text(tutorial.read_text() + "# more\n")
    (upstream / ".github/workflows/ci.yml").write_text("new\n")
    # (so do its questions)
    questions = (upstream / "cookiecutter.json").read_text()
    questions = questions.replace('"author": "",', '"author": "", "__loud": "{{ 1 | loud }}",')
    (upstream / "cookiecutter.json").write_text(questions)
    machine = (upstream / "hooks/template.py").read_text()
    line = 'environment.filters["checked"] = checked'
    loud = f'{line}\n        environment.filters["loud"] = str'
    (upstream / "hooks/template.py").write_text(machine.replace(line, loud))
    commit(upstream)
    # and both meet.
    said = done(*cruft, "update", "-y", at=mine)
    assert "Good work" in said
    assert (mine / "src/my_net/brand_new.py").read_text() == new.replace("project", "my_net")
    assert (mine / "conf/model/new.yaml").read_text() == "_target_: my_net.brand_new.Net\n"
    assert model.read_text().startswith('"""Better: ')
    assert model.read_text().endswith("\n\nMINE = 1\n")
    assert readme.read_text() == "# Mine, and no template's\n"
    assert own.read_text() == "from project import mine\n"
    gone = ["conf/trainer/gpu.yaml", "conf/experiment/tutorial.yaml", ".github", "src/project"]
    assert [path for path in gone if (mine / path).exists()] == []
    assert not [*mine.rglob("*.rej")]
    commit(mine)
    assert "Nothing to do" in done(*cruft, "update", "-y", at=mine)


# The whole of it


@pytest.mark.slow
def test_it_trains_from_any_folder_under_a_path_with_blanks(template, tmp_path):
    made = make(template, tmp_path / "a path with blanks", "My Project")
    few = "experiment=quickstart", "trainer.max_epochs=1", "data.source.num_train=1000"
    done(sys.executable, made / "train.py", *few, at=tmp_path, PYTHONPATH=str(made / "src"))
    (results,) = tmp_path.glob("outputs/*/*/results.json")
    assert json.loads(results.read_text())["status"] == "complete"


@pytest.mark.slow
def test_it_passes_all_of_its_tests_ruff_and_pyright_in_a_fresh_environment(template, tmp_path):
    made = make(template, tmp_path / "a path with blanks", "My Project")
    if (REPOSITORY / "data/cifar10-jpeg").exists():
        (made / "data").mkdir()
        (made / "data/cifar10-jpeg").symlink_to((REPOSITORY / "data/cifar10-jpeg").resolve())
    own = {"PYTHONPATH", "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST", "PYTHONDONTWRITEBYTECODE"}
    environment = {key: value for key, value in os.environ.items() if key not in own}
    ran = subprocess.run(
        ["bash", ".ci/run"], cwd=made, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert ran.returncode == 0, ran.stdout[-10_000:]
    assert len(re.findall(r"\d+ passed", ran.stdout)) == 2, ran.stdout[-1000:]
    assert "My Project" in (made / "README.md").read_text()
    assert done("git", "status", "--porcelain", at=made) == ""  # what tests leave is ignored


# The rename

BEFORE = '''
"""About project.model, a project of mine; see src/project/model.py. python -m project.model x."""
import project.model, projects, project as p
from project import model  # from project import model
from project.model import CNN
from my import project as other
import other.project.model
from .project import z
def f(a, project_=1, **kw): return kw["project"], a.project.model, f(a, project=1)
x = {"_target_": "project.mine.CNN", "project": "project"}, "my.project.model", "pyproject.toml"
y = project.model.CNN, "project. Model", "project.unknown", project
z = f"{{é}} {project.model!r:>{len('project.model')}} project", rb"project.model", f"""{1}
project.model.Net"""
class Project: project: int = 1
'''
AFTER = '''
"""About net.model, a project of mine; see src/net/model.py. python -m net.model x."""
import net.model, projects, net as p
from net import model  # from net import model
from net.model import CNN
from my import project as other
import other.project.model
from .project import z
def f(a, project_=1, **kw): return kw["project"], a.project.model, f(a, project=1)
x = {"_target_": "net.mine.CNN", "project": "project"}, "my.project.model", "pyproject.toml"
y = net.model.CNN, "project. Model", "project.unknown", net
z = f"{{é}} {net.model!r:>{len('net.model')}} project", rb"net.model", f"""{1}
net.model.Net"""
class Project: project: int = 1
'''
TOML = """
[project]
name = "project"
[project.model]
packages = ["src/project"]
include = ["src/project/{model}.py", "my-project"]
"""
YAML = """
wandb: {_target_: lightning.pytorch.loggers.WandbLogger, project: project}  # your project's name
project:
  model: {_target_: project.model.CNN, x: ${project.model}, y: "${{ project }}"}
"""


SCOPES = """import project.model
try: import project
except ImportError: project = None
def f(project): return project.model
def g(): return project.model, [project for project in "ab"], (lambda project: project)
class A:
    project: int = 1
    def h(self): return project.model
for project in (): project()
def k():
    global project
    project = None
text = "import project; project.model.x()\\nfrom project import y\\nproject.model.Net"
"""
SHELL = """python -c "import project; project.model.x()"; python -m project.env; cmd -m project
import project as p, project.Net, in the project. Model, project-model, project.model-x
"""


def test_the_package_is_renamed_and_the_word_is_not():
    assert renamed("a.py", BEFORE, {"model"}, "net") == AFTER
    toml = TOML.replace("src/project", "src/net")
    assert renamed("a.toml", TOML, {"model"}, "net") == toml
    yaml = YAML.replace("_: project.model.CNN", "_: net.model.CNN")
    assert renamed("a.yaml", YAML, {"model"}, "net") == yaml
    no_import = "def f(project):\n    return project.model\n"
    assert renamed("a.py", no_import, {"model"}, "net") == no_import


def test_a_variable_of_that_name_is_left_alone():
    kept = ["def f(project): return project.model", "[project for project in", "project: int = 1"]
    kept += ["lambda project: project"]
    text = renamed("a.py", SCOPES, {"model"}, "net")
    assert all(part in text for part in kept)
    for part in kept:
        text = text.replace(part, "")
    assert "project" not in text


def test_code_that_is_quoted_is_renamed():
    expected = SHELL.replace("project.model.x", "net.model.x").replace("project.Net", "net.Net")
    expected = expected.replace("import project", "import net").replace("project.env", "net.env")
    assert renamed("a.sh", SHELL, {"model", "env"}, "net") == expected


def test_python_that_cannot_be_parsed_is_named():
    with pytest.raises(ValueError, match=r"bad\.py: "):
        renamed("bad.py", "def (\n", {"model"}, "net")
