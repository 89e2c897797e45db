"""What a run leaves behind: the quickstart, as the README has it."""

from pathlib import Path

import pytest
import torch

from conftest import history, outcome

from project.model import CNN

# What a shell may have left over from other launchers; none of it may reach a rank.
STRAY = dict.fromkeys(["RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID"], "3")
STRAY |= {"WORLD_SIZE": "7", "SLURM_NTASKS": "7", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "x"}
STRAY |= {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}


@pytest.fixture(scope="module")
def quickstart(command, tmp_path_factory):
    """The run folder, and what was printed."""
    folder = tmp_path_factory.mktemp("quick start=ü") / "run"
    done = command(
        "python", "train.py", "experiment=quickstart", f'hydra.run.dir="{folder}"', **STRAY
    )
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture
def folder(quickstart) -> Path:
    return quickstart[0]


def test_the_quickstart_trains_in_a_minute_and_tests_above_90_percent(folder):
    results = outcome(folder)
    assert results["status"] == "complete"
    assert results["test/acc"] > 0.9
    assert results["test/count"] == 2000
    assert results["seconds"] < 60
    assert (results["epochs"], results["steps"]) == (4, 180)
    assert results["checkpoint"] == "checkpoints/best.ckpt"


def test_the_folder_holds_what_the_design_says(folder):
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    expected = {f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")}
    names = "last.ckpt", "previous.ckpt", "best.ckpt", "model.pt"
    expected |= {f"checkpoints/{name}" for name in names}
    expected |= {"metrics.csv", "results.json", "train.log", "ranks/1-0.log", "ranks/lock"}
    expected |= {f"plots/{name}.png" for name in ("curves", "confusion", "mistakes")}
    tensorboard = {name for name in files if name.startswith("tensorboard/")}
    assert files - tensorboard == expected  # no part of a file
    assert any("events.out.tfevents" in name for name in tensorboard)


def test_the_history_and_the_results_agree(folder):
    results = outcome(folder)
    rows = history(folder)
    assert list(rows[0]) == ["epoch", "step", "train/loss", "train/acc", "val/loss", "val/acc"]
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4"]
    assert (
        float(max(rows, key=lambda row: float(row["val/acc"]))["val/loss"]) == results["val/loss"]
    )


def test_rank_0_speaks_on_the_console_and_the_others_in_their_files(quickstart):
    folder, done = quickstart
    shown = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
    logged = (folder / "train.log").read_text()
    assert len(shown) == 4 + 180 // 20
    assert done.stdout.splitlines()[0].startswith("run folder ")
    assert all(line in logged for line in shown)
    assert "epoch" in (folder / "ranks/1-0.log").read_text()
    assert done.stderr == ""


def test_checkpoints_are_plain_and_the_model_loads_without_the_project(folder):
    best = torch.load(folder / "checkpoints/best.ckpt", weights_only=True)
    model = torch.load(folder / "checkpoints/model.pt", weights_only=True)
    network = CNN(num_classes=10, widths=[16, 32, 64])
    network.load_state_dict(model)
    assert {f"net.{name}" for name in model} == set(best["state_dict"])
    assert all(torch.equal(best["state_dict"][f"net.{name}"], model[name]) for name in model)


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(folder, command):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = command("python", "train.py", "experiment=quickstart", f'hydra.run.dir="{folder}"')
    assert done.returncode == 1
    assert done.stderr == f"train.py: {folder} already holds a run. Choose another folder.\n"
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
