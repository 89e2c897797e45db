"""Ranks start right and end together, whoever launches them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from conftest import TINY
from project import devices as devices_module
from project.devices import num_local_ranks
from project.errors import UserError
from project.folder import unused_folder

# Devices


def ranks(accelerator: str, devices: object, num_gpus: int, monkeypatch) -> int:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(devices_module, "num_cores", lambda: 1)
    config = OmegaConf.create({"accelerator": accelerator, "devices": devices})
    return num_local_ranks(config)


@pytest.mark.parametrize(
    ("accelerator", "devices", "num_gpus", "expected"),
    [
        ("auto", 1, 0, 1),
        ("auto", 4, 0, 4),
        ("auto", "auto", 0, 1),
        ("cpu", 2, 8, 2),
        ("auto", 4, 8, 4),
        ("auto", -1, 8, 8),
        ("gpu", "auto", 8, 8),
        ("gpu", [0, 1], 8, 2),
        ("gpu", [7], 8, 1),
    ],
)
def test_devices_mean(accelerator, devices, num_gpus, expected, monkeypatch):
    assert ranks(accelerator, devices, num_gpus, monkeypatch) == expected


@pytest.mark.parametrize(
    ("accelerator", "devices", "num_gpus", "message"),
    [
        ("auto", -1, 0, "choose 1 to 4 ranks"),
        ("auto", [0, 1], 0, "choose 1 to 4 ranks"),
        ("cpu", 5, 0, "trainer.devices=5.*1 to 4"),
        ("cpu", 0, 0, "trainer.devices=0"),
        ("cpu", "two", 0, "trainer.devices=two"),
        ("gpu", 1, 0, "sees no GPU"),
        ("gpu", 9, 8, "trainer.devices=9.*8 GPUs"),
        ("gpu", [0, 8], 8, "8 GPUs here, from 0"),
        ("gpu", [1, 1], 8, "8 GPUs here"),
        ("gpu", [], 8, "give a number"),
        ("gpu", 0, 8, "give a number"),
        ("gpu", -2, 8, "give a number"),
    ],
)
def test_devices_that_do_not_exist_are_refused(
    accelerator, devices, num_gpus, message, monkeypatch
):
    with pytest.raises(UserError, match=message):
        ranks(accelerator, devices, num_gpus, monkeypatch)


def test_runs_that_start_in_the_same_second_never_share_a_folder(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: unused_folder(f"{tmp_path}/12-30-00"), range(40)))
    assert len(set(folders)) == 40
    assert f"{tmp_path}/12-30-00" in folders


# Launching


def outcome(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def live_ranks(folder: Path) -> list[int]:
    """Processes that still have the run's folder on their command line or among their files."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and str(folder) in _open_files(pid)]


def _open_files(pid: int) -> str:
    try:
        return " ".join(str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # ended meanwhile
        return ""


@pytest.fixture(scope="module")
def torchrun(command, tmp_path_factory):
    """A run on two ranks that torchrun started, in the tutorial's own form: folder and output."""
    folder = tmp_path_factory.mktemp("torchrun") / "run"
    place = ["--nnodes=1", "--node_rank=0", "--master_addr=localhost", "--master_port=12355"]
    launcher = ["torchrun", "--nproc_per_node=2", *place, "train.py"]
    return folder, command(*launcher, *TINY, f"hydra.run.dir={folder}")


def test_torchrun_trains_in_one_run_folder(torchrun):
    folder, done = torchrun
    assert done.returncode == 0, done.stderr
    assert outcome(folder)["status"] == "complete"
    assert outcome(folder)["test/count"] == 101
    assert done.stdout.count("epoch 2  step 12") == 1  # rank 0 alone on the console
    assert "epoch 2  step 12" in (folder / "ranks/1-0.log").read_text()


def test_torchrun_and_our_own_launch_give_the_same_bits(torchrun, command, tmp_path):
    done = command("python", "train.py", *TINY, f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    theirs, ours = (
        torch.load(folder / "checkpoints/model.pt", weights_only=True)
        for folder in (torchrun[0], tmp_path / "run")
    )
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    seconds = {"seconds": None}
    assert outcome(torchrun[0]) | seconds == outcome(tmp_path / "run") | seconds


def test_a_device_count_that_is_not_torchruns_is_refused_with_both_numbers(command, tmp_path):
    more = ["trainer.devices=1", f"hydra.run.dir={tmp_path}/run"]
    done = command("torchrun", "--nproc-per-node=2", "train.py", *TINY, *more)
    assert done.returncode != 0
    assert "trainer.devices=1 × trainer.num_nodes=1 are 1 ranks, but torchrun started 2." in (
        done.stderr
    )


def test_in_place_trains_in_the_process_that_was_started(command, tmp_path):
    more = ["trainer.devices=1", "launch.inplace=true", f"hydra.run.dir={tmp_path}/run"]
    done = command("python", "train.py", *TINY, *more)
    assert done.returncode == 0, done.stderr
    assert outcome(tmp_path / "run")["test/count"] == 101
    assert "test/acc" in done.stdout


@pytest.mark.parametrize(
    ("how", "rank", "reason"),
    [
        ("exception", 1, "rank 1 failed: ArithmeticError: injected"),
        ("exit", 0, "rank 0 failed: SystemExit: 0"),
        ("kill", 1, "rank 1 "),  # ... ended with status -9, or: died without a word
    ],
)
def test_the_first_failing_rank_ends_the_job_and_is_named(command, tmp_path, how, rank, reason):
    fault = [f"+callbacks.fault.{k}={v}" for k, v in {"rank": rank, "step": 5, "how": how}.items()]
    more = ["+callbacks.fault._target_=faults.Fault", *fault, f"hydra.run.dir={tmp_path}/run"]
    done = command("python", "train.py", *TINY, *more)
    assert done.returncode == 1
    assert f"train.py: {reason}" in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == (how != "kill")
    assert outcome(tmp_path / "run")["status"] == "failed"
    assert outcome(tmp_path / "run")["reason"].startswith(reason)
    assert not live_ranks(tmp_path / "run")
    if how == "exception":
        assert "faults.py" in done.stderr
        assert "injected" in (tmp_path / "run/ranks/1-0.log").read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_size=41", "train.py: data.batch_size=41 is the global batch"),
        ("trainer.devices=-1", "train.py: trainer.devices=-1: on this CPU choose"),
        ("trainer.max_stepz=1", "Could not override 'trainer.max_stepz'."),
    ],
)
def test_a_mistake_ends_in_a_line_without_a_traceback(command, tmp_path, override, message):
    done = command("python", "train.py", *TINY, override, f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr
