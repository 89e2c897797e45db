"""Fixtures: real processes, real images, small datasets."""

import csv
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from torchvision.datasets import CIFAR10, ImageFolder
from train import train

from laws import composed

from project.augment import Augment
from project.datamodule import ImageDataModule
from project.launch import run
from project.sources import shapes

# One thread a rank, whatever the caller exports, so that sums are made in one order:
# in this process and in all that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

REPOSITORY = Path(__file__).parents[1]
TRAIN = str(REPOSITORY / "train.py")
REAL_IMAGES = REPOSITORY / "data" / "cifar10-jpeg"
needs_docs = pytest.mark.skipif(
    not (REPOSITORY / "docs").exists(), reason="this project has no docs/"
)
# A run of seconds on drawn shapes, to which tests add what they are about.
TINY = [
    "experiment=quickstart",
    "data.source.num_train=400",
    "data.source.num_test=101",
    "data.batch_size=40",
    "model._target_=toy.Plain",
    "~model.widths",
    "+model.width=4",
    "trainer.max_steps=12",
    "optimizer.lr=0.1",
]

# Of a data module.
DATA: dict[str, Any] = {
    "image_size": 32,
    "batch_size": 30,
    "eval_batch_size": 16,
    "val_fraction": 0.1,
    "split_seed": 0,
    "limit_train_images": None,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.25, 0.25, 0.25),
    "augment": Augment(crop_padding=4, flip=True),
    "num_workers": 0,
    "pin_memory": False,
    "seed": 0,
}

Run = subprocess.CompletedProcess[str]


def environment(**variables: str) -> dict[str, str]:
    """With the tests' own modules to import."""
    own = [str(REPOSITORY / "src"), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, own))
    return {**os.environ, "PYTHONPATH": path, **variables}


def outcome(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def history(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def make_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ImageDataModule]:
    """Makes the data of 200 drawn images, with changes."""
    root = tmp_path_factory.mktemp("shapes")
    source = partial(shapes, num_train=200, num_test=101, seed=0)
    return lambda **changes: ImageDataModule(source, str(root), **DATA | changes)


@pytest.fixture(scope="session")
def working_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run, and leave the data sets that they make."""
    return tmp_path_factory.mktemp("working")


@pytest.fixture(scope="session")
def start(working_folder: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a command line, from outside the repository; torchrun and train.py are found."""

    def popen(*arguments: str, apart: bool = False, **variables: str) -> subprocess.Popen[str]:
        program, *words = (TRAIN if word == "train.py" else word for word in arguments)
        launcher = ["-m", "torch.distributed.run"] if program == "torchrun" else []
        return subprocess.Popen(
            [sys.executable, *launcher, *words],
            cwd=working_folder,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=apart,  # a process group of its own
        )

    return popen


@pytest.fixture(scope="session")
def command(start: Callable[..., Any]) -> Callable[..., Run]:
    """Runs a command line to its end."""

    def run(*arguments: str, timeout: float = 100, **variables: str) -> Run:
        with start(*arguments, **variables) as process:
            output, errors = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    return run


@pytest.fixture(scope="session")
def run_here(working_folder: Path) -> Callable[..., Path]:
    """Runs a job of train.py on one rank in this process; returns its folder.

    What train.py would print as a mistake is raised as UserError.
    """

    def run_here(folder: Path, *overrides: str) -> Path:
        (folder / ".hydra").mkdir(parents=True)
        cfg = composed(*overrides, "trainer.devices=1", "launch.inplace=true")
        OmegaConf.save(cfg, folder / ".hydra/config.yaml")
        OmegaConf.save(list(overrides), folder / ".hydra/overrides.yaml")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(working_folder)
            run(folder, train)
        return folder

    return run_here


@pytest.fixture
def job(run_here: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """The same in a folder of the test's own."""

    def job(*overrides: str, name: str = "run") -> Path:
        return run_here(tmp_path / name, *overrides)

    job.folder = tmp_path  # type: ignore[attr-defined]
    return job


@pytest.fixture(scope="session")
def torchrun(command: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run on two ranks that torchrun started, in the tutorial's own form: folder and output."""
    folder = tmp_path_factory.mktemp("torchrun") / "run"
    place = ["--nnodes=1", "--node_rank=0", "--master_addr=localhost", "--master_port=12355"]
    launcher = ["torchrun", "--nproc_per_node=2", *place, "train.py"]
    return folder, command(*launcher, *TINY, f"hydra.run.dir={folder}")


@pytest.fixture
def two_ranks(torchrun: Any) -> Path:
    """Its folder."""
    return torchrun[0]


@pytest.fixture(scope="session")
def real_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder of 100 + 10 real images a class: CIFAR-10 (JPEG copies)."""
    if not REAL_IMAGES.exists():
        pytest.skip(f"needs real images in {REAL_IMAGES.relative_to(REPOSITORY)}, see README.md")
    root = tmp_path_factory.mktemp("real")
    for split, count in ("train", 100), ("test", 10):
        for folder in sorted((REAL_IMAGES / split).iterdir()):
            (root / split / folder.name).mkdir(parents=True)
            for path in sorted(folder.iterdir())[:count]:
                (root / split / folder.name / path.name).symlink_to(path)
    return root


@pytest.fixture(scope="session")
def some_images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For laws that hold for any images: real ones where there are some, else drawn ones."""
    if REAL_IMAGES.exists():
        return request.getfixturevalue("real_images")
    root = tmp_path_factory.mktemp("drawn")
    draw(root, "train", 1000)
    draw(root, "test", 100)
    return root


@pytest.fixture(scope="session")
def many_images(some_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same to train on, and 10,000 to test."""
    root = tmp_path_factory.mktemp("many")
    (root / "train").symlink_to(some_images / "train")
    if REAL_IMAGES.exists():
        (root / "test").symlink_to(REAL_IMAGES / "test")
    else:
        draw(root, "test", 10_000)
    return root


def draw(root: Path, split: str, count: int) -> None:
    """Makes an image folder of shapes."""
    labels, classes, images = shapes(root, split, 32, num_train=count, num_test=count, seed=0)
    for number, (label, image) in enumerate(zip(labels, images, strict=True)):
        path = root / split / classes[label] / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def unless(quick: bool) -> list[Any]:
    """Marks of a case."""
    return [] if quick else [pytest.mark.slow]


def chosen(items: list[Any], name: str, **others: Any) -> list[Any]:
    """The values of one parameter in the chosen tests that have `others`, and None for none."""
    found = [item.callspec.params for item in items if hasattr(item, "callspec")]
    found = [params for params in found if others.items() <= params.items()]
    return list(dict.fromkeys(params.get(name) for params in found))


@pytest.fixture(scope="session")
def thousand_images(real_images: Path) -> torch.Tensor:
    """The 1,000 real training images, (1000, 3, 32, 32) uint8, decoded without our code."""
    from torchvision.transforms.functional import pil_to_tensor

    return torch.stack([pil_to_tensor(image) for image, _ in ImageFolder(real_images / "train")])


@pytest.fixture
def cifar10_folder(tmp_path: Path, monkeypatch: Any) -> Path:
    """100 + 20 images in CIFAR-10's files; torchvision's checksums are set to theirs."""
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)

    def write(name: str, content: dict) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    def batch(name: str) -> list[str]:
        pixels = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
        labels = [i % 10 for i in range(20)]
        return [name, write(name, {"data": pixels, "labels": labels})]

    train = [batch(name) for name, _ in CIFAR10.train_list]
    meta = {"label_names": [f"class {i}" for i in range(10)]}
    monkeypatch.setattr(CIFAR10, "train_list", train)
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch")])
    md5 = write("batches.meta", meta)
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5})
    return tmp_path
