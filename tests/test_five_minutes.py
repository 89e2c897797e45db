"""A newcomer's five minutes: a network of one's own, data of one's own, and a training."""

import shlex

import pytest
from omegaconf import OmegaConf

from conftest import outcome

# What a person writes. First the module:
MODULE = """
import numpy as np
from torch import nn

from project.sources import Listing


class MyNet(nn.Module):
    def __init__(self, num_classes, depth):
        super().__init__()
        widths = [3 * 8 * 8] + [16] * depth
        hidden = [m for i, o in zip(widths, widths[1:]) for m in (nn.Linear(i, o), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(widths[-1], num_classes))

    def forward(self, images):
        return self.layers(images)


def day_and_night(root, split, image_size):
    rng = np.random.default_rng(split == "train")
    labels = np.arange(200) % 2
    noise = rng.integers(0, 128, (200, image_size, image_size, 3), dtype=np.uint8)
    light = (127 * labels).astype(np.uint8).reshape(-1, 1, 1, 1)
    return Listing(labels.tolist(), ["night", "day"], noise + light)
"""
# Then two lines of YAML for the network, and four for the data:
NET = "_target_: my_package.MyNet\ndepth: 2\n"
DATA = """defaults: [images, _self_]
source: {_target_: my_package.day_and_night, _partial_: true}
root: data/mine
image_size: 8
"""


@pytest.fixture
def mine(tmp_path):
    """A folder with the three files."""
    (tmp_path / "my_package.py").write_text(MODULE)
    for group, text in ("model", NET), ("data", DATA):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(text)
    return tmp_path


@pytest.mark.slow
def test_a_network_and_data_of_ones_own_train_on_two_ranks(command, mine, working_folder):
    words = ["model=mine", "data=mine", "data.batch_size=20", "data.augment.crop_padding=0"]
    words += ["optimizer.lr=0.05", "trainer.devices=2", "trainer.max_epochs=3", "trainer=cpu"]
    words += [f"hydra.run.dir={mine}/run", "--config-dir", f"{mine}/conf"]
    path = {"PYTHONPATH": str(mine)}
    done = command("python", "train.py", *words, **path)
    assert done.returncode == 0, done.stderr
    results = outcome(mine / "run")
    assert results["test/acc"] == 1
    assert results["test/count"] == 200
    _, line = done.stdout.splitlines()[-1].split("evaluate with: python train.py ")
    fit, path, trust = shlex.split(line)
    assert (fit, trust) == ("fit=false", "trusted=[my_package]")
    assert (working_folder / path.removeprefix("ckpt_path=")).exists()


@pytest.mark.slow
def test_help_shows_a_yaml_that_was_added(command, mine):
    done = command("python", "train.py", "--help", "--config-dir", f"{mine}/conf")
    assert done.returncode == 0, done.stderr
    assert "model: cnn, cnn_small, mine, resnet18, speednet\n" in done.stdout
    assert done.stdout.count("\n  python ") >= 10  # commands people need


def test_the_config_is_printed_resolved(command, mine):
    options = ["--cfg", "job", "--resolve", "--config-dir", f"{mine}/conf"]
    done = command("python", "train.py", "model=mine", "data=mine", *options)
    assert done.returncode == 0, done.stderr
    cfg = OmegaConf.create(done.stdout)
    assert (cfg.model.depth, cfg.data.image_size, cfg.seed) == (2, 8, 0)
