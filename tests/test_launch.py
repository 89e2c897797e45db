"""Ranks start right and end together, whoever launches them."""

import csv
import faulthandler
import logging
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

import laws
from conftest import TINY, outcome
from toy import Plain

from project import devices as devices_module
from project import signals, sources
from project.augment import normalise
from project.devices import check_world, num_local_ranks
from project.errors import Preempted, RankFailed, UserError
from project.failure import dead_ranks
from project.files import write_json
from project.folder import unused_folder
from project.launch import run
from project.pack import pack
from project.processes import pid_file
from project.rank import run_rank

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
        ("cpu", True, 0, "trainer.devices=True"),
        ("gpu", 1, 0, "sees no GPU"),
        ("gpu", 9, 8, "trainer.devices=9.*8 GPUs"),
        ("gpu", [0, 8], 8, "8 GPUs here, from 0"),
        ("gpu", [1, 1], 8, "8 GPUs here"),
        ("gpu", [], 8, "give a number"),
        ("gpu", True, 8, "trainer.devices=True"),
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


def live_ranks(folder: Path) -> list[int]:
    """Processes that still have the run's folder on their command line or among their files."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and str(folder) in _open_files(pid)]


def _open_files(pid: int) -> str:
    try:
        return " ".join(str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # ended meanwhile
        return ""


def test_torchrun_trains_in_one_run_folder(torchrun):
    folder, done = torchrun
    assert done.returncode == 0, done.stderr
    assert outcome(folder)["status"] == "complete"
    assert outcome(folder)["test/count"] == 101
    assert done.stdout.count("epoch 2  step 12") == 1  # rank 0 alone on the console
    assert "epoch 2  step 12" in (folder / "ranks/1-0.log").read_text()


@pytest.mark.slow
def test_torchrun_and_our_own_launch_with_loader_workers_give_the_same_bits(
    torchrun, command, tmp_path
):
    more = ["data.num_workers=2", f"hydra.run.dir={tmp_path}/run"]
    done = command("python", "train.py", *TINY, *more)
    assert done.returncode == 0, done.stderr
    theirs, ours = (
        torch.load(folder / "checkpoints/model.pt", weights_only=True)
        for folder in (torchrun[0], tmp_path / "run")
    )
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    seconds = {"seconds": None}
    assert outcome(torchrun[0]) | seconds == outcome(tmp_path / "run") | seconds


def test_a_device_count_that_is_not_torchruns_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_world(2, OmegaConf.create({"devices": 2, "num_nodes": 1}))
    message = r"trainer.devices=1 × trainer.num_nodes=1 are 1 ranks, but torchrun started 2\."
    with pytest.raises(UserError, match=message):
        check_world(1, OmegaConf.create({"devices": 1, "num_nodes": 1}))


@pytest.fixture(scope="module")
def alone(run_here, tmp_path_factory):
    """The same run on one rank, in this process: its folder."""
    return run_here(tmp_path_factory.mktemp("alone") / "run", *TINY)


def test_the_number_of_ranks_changes_only_the_speed(torchrun, alone):
    one, two = outcome(alone), outcome(torchrun[0])
    assert one["test/count"] == two["test/count"] == 101
    assert one["steps"] == two["steps"] == 12
    for name in "val/loss", "test/loss":
        assert one[name] == pytest.approx(two[name], rel=1e-5)
    histories = []
    for folder in alone, torchrun[0]:
        with (folder / "metrics.csv").open() as file:
            rows = list(csv.reader(file))[1:]
        histories.append([float(value or "nan") for row in rows for value in row])
    assert histories[0] == pytest.approx(histories[1], rel=1e-5, nan_ok=True)


def test_the_test_scores_the_best_checkpoint_not_the_last(alone, working_folder):
    """Step 12 lies inside the second epoch, so the best is step 9."""
    best, last = (
        torch.load(alone / f"checkpoints/{name}.ckpt", weights_only=True)
        for name in ("best", "last")
    )
    assert (best["global_step"], last["global_step"]) == (9, 12)
    net = Plain(num_classes=10, width=4)
    net.load_state_dict(torch.load(alone / "checkpoints/model.pt", weights_only=True))
    source = partial(sources.shapes, num_train=400, num_test=101, seed=0)
    images, labels, _ = pack(source, working_folder / "data/shapes", "test", 32)[torch.arange(101)]
    with torch.no_grad():
        logits = net(normalise(images, [0.5] * 3, [0.5] * 3))
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    assert outcome(alone)["test/loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("how", "rank", "reason"),
    [
        ("exception", 1, "rank 1 failed: ArithmeticError: injected"),
        pytest.param("vanish", 1, "rank 1 died without a word", marks=pytest.mark.slow),
        # ... ended with status -9, or: died without a word
        pytest.param("kill", 1, "rank 1 ", marks=pytest.mark.slow),
    ],
)
def test_the_first_failing_rank_ends_the_job_and_is_named(command, tmp_path, how, rank, reason):
    fault = [
        f"+callbacks.fault.{k}={v}" for k, v in {"rank": rank, "steps": "[5]", "how": how}.items()
    ]
    more = ["+callbacks.fault._target_=faults.Fault", *fault, f"hydra.run.dir={tmp_path}/run"]
    done = command("python", "train.py", *TINY, *more)
    assert done.returncode == 1
    assert f"train.py: {reason}" in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == (how == "exception")
    assert outcome(tmp_path / "run")["status"] == "failed"
    assert outcome(tmp_path / "run")["reason"].startswith(reason)
    assert not live_ranks(tmp_path / "run")
    if how == "exception":
        assert "faults.py" in done.stderr
        assert "injected" in (tmp_path / "run/ranks/1-0.log").read_text()


ENDINGS = [
    pytest.param(signal.SIGTERM, os.kill, 143, marks=pytest.mark.slow),
    pytest.param(signal.SIGTERM, os.killpg, 143, marks=pytest.mark.slow),  # as `timeout` does
    pytest.param(signal.SIGINT, os.kill, 130, marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, os.killpg, 130, marks=pytest.mark.slow),  # as a terminal does
    (signal.SIGKILL, os.kill, -9),
]


@pytest.mark.parametrize(("number", "send", "status"), ENDINGS)
def test_no_process_outlives_the_one_that_was_started(start, tmp_path, number, send, status):
    folder = tmp_path / "run"
    endless = ["trainer.max_steps=-1", "trainer.max_epochs=100000", "trainer.log_every_n_steps=1"]
    more = [*endless, "data.num_workers=1", f"hydra.run.dir={folder}"]
    with start("python", "train.py", *TINY, *more, apart=True) as process:
        assert any("epoch 2" in line for line in process.stdout)
        processes = family(process.pid)
        assert len(processes) >= 1 + 1 + 2 + 2  # parent, fork server, ranks, loader workers
        send(process.pid, number)
        assert process.wait(timeout=20) == status
        errors = process.stderr.read()  # ends when the last process that could write has ended
    until = time.monotonic() + 10
    while alive(processes):
        assert time.monotonic() < until, f"still there: {alive(processes)}"
        time.sleep(0.05)
    if number != signal.SIGKILL:
        results = outcome(folder)
        assert results["status"] == "preempted"
        assert results["reason"].startswith(f"stopped by {number.name} at step ")
        assert errors.startswith(f"train.py: {results['reason']}. Go on with: ")


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in family(int(child)))]


def alive(pids: list[int]) -> list[int]:
    """Those that have not ended, whether or not their parent has noticed."""
    stats = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [pid for pid, stat in stats.items() if stat.exists() and ") Z" not in stat.read_text()]


@pytest.mark.slow
def test_help_under_torchrun_ends_on_all_ranks(command):
    done = command("torchrun", "--nproc-per-node=2", "train.py", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Choices (GROUP=NAME)") == 1


def in_place(folder: Path, train, **trainer) -> dict:
    """A run in this process, of a program of the test's own."""
    (folder / ".hydra").mkdir(exist_ok=True)
    names = ["fit", "test", "compile", "ckpt_path", "weights", "trusted", "label_smoothing"]
    values = [True, False, False, None, None, [], 0]
    config = {"seed": 0, "optimized_metric": "val/acc"} | dict(zip(names, values, strict=True))
    config["launch"] = {"inplace": trainer.pop("inplace", True), "timeout": 60, "max_restarts": 0}
    config["checkpoint"] = {"every_n_steps": None, "every_minutes": None, "top_k": 1}
    config["trainer"] = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, **trainer}
    OmegaConf.save(OmegaConf.create(config), folder / ".hydra" / "config.yaml")
    return run(folder, train)


def test_success_is_what_this_attempt_writes(tmp_path):
    (tmp_path / "ranks").mkdir()
    names = "results.json ranks/1-0.json ranks/1.pid .metrics.csv-0 checkpoints/.last.ckpt-0"
    stale = [tmp_path / name for name in names.split()]
    (tmp_path / "checkpoints").mkdir()
    for path in stale:
        path.write_text("{}")
    seen = in_place(tmp_path, lambda cfg, folder: {"stale": [path.exists() for path in stale]})
    assert seen["stale"] == [False] * 5
    assert seen["status"] == "complete"


def test_who_is_dead_and_who_is_not(tmp_path, monkeypatch):
    """The other rank is a forked process, since locks belong to processes."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/7.pid").write_text("1")  # nobody holds it

    def ask(queue) -> None:
        os.environ["RANK"] = "1"
        queue.put(dead_ranks(tmp_path))

    monkeypatch.setenv("RANK", "0")
    fork = multiprocessing.get_context("fork")
    with pid_file(tmp_path / "ranks/0.pid"):
        assert dead_ranks(tmp_path) == [7]
        queue = fork.SimpleQueue()
        process = fork.Process(target=ask, args=(queue,))
        process.start()
        assert queue.get() == [7]  # asking has not cost rank 0 its own lock
        process.join()


def test_a_rank_that_waits_for_one_that_never_comes_ends_when_it_is_asked(tmp_path):
    """It waits in C++, where no handler of Python runs."""

    def join() -> None:
        names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        os.environ.update(names)
        run_rank(tmp_path, lambda cfg, folder: {}, dist.HashStore())

    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(laws.composed("experiment=quickstart"), tmp_path / ".hydra/config.yaml")
    process = multiprocessing.get_context("fork").Process(target=join)
    process.start()
    until = time.monotonic() + 60
    while "gloo_tcp_loop" not in _threads(process.pid):
        assert process.is_alive()
        assert time.monotonic() < until
        time.sleep(0.01)
    process.terminate()
    process.join(5)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGTERM


def _threads(pid: int | None) -> list[str]:
    return [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]


def test_a_missing_value_is_named(tmp_path):
    with pytest.raises(UserError, match=r"Give a value: trainer.root=\.\.\."):
        in_place(tmp_path, lambda cfg, folder: {}, root="???")


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"devices": 2}, "launch.inplace trains one rank"),
        ({"num_nodes": 2, "inplace": False}, "torchrun on every node"),
        ({"accelerator": "tpu"}, "choose auto, cpu or gpu"),
    ],
)
def test_what_cannot_be_launched_is_refused(tmp_path, trainer, message):
    with pytest.raises(UserError, match=message):
        in_place(tmp_path, lambda cfg, folder: {}, **trainer)
    assert message in outcome(tmp_path)["reason"]


def test_what_ends_a_run_after_its_completion_takes_nothing_away(tmp_path):
    def train(cfg, folder):
        write_json(folder / "results.json", {"status": "complete", "test/acc": 0.5})
        raise ArithmeticError

    with pytest.raises(RankFailed):
        in_place(tmp_path, train)
    assert outcome(tmp_path) == {"status": "complete", "test/acc": 0.5}


def test_a_rank_that_fails_since_another_was_stopped_first_has_stopped(tmp_path):
    """Its request comes while it waits in C++ for the other, and fails with the connection."""

    def train(cfg, folder):
        signals._request = signal.SIGTERM
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(Preempted):
        in_place(tmp_path, train)
    assert outcome(tmp_path)["status"] == "preempted"


def test_a_rank_that_fails_since_another_was_killed_has_failed(tmp_path):
    """The agent has asked it to stop before it came to the next collective."""

    def train(cfg, folder):
        (folder / "ranks/1.pid").write_text("1")  # nobody holds it
        signals._request = signal.SIGTERM
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RankFailed, match="rank 1 died without a word"):
        in_place(tmp_path, train)
    assert outcome(tmp_path)["status"] == "failed"


def test_who_is_stopped_since_another_was_killed_hides_it_not(tmp_path):
    with pytest.raises(RankFailed, match="rank 1 ended with status -9"):
        laws.launch(tmp_path / "run", laws.one_is_killed, 2)
    assert outcome(tmp_path / "run")["status"] == "failed"


class Speechless(BaseException):
    def __str__(self) -> str:
        raise UnicodeError


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit(0), "SystemExit: 0"),
        (KeyboardInterrupt(), "KeyboardInterrupt$"),
        (Speechless(), r"Speechless: \(its message cannot be shown: UnicodeError\)"),
        (OSError("bad \udcff name"), r"OSError: bad \\udcff name"),
    ],
)
def test_whatever_ends_a_rank_early_is_a_failure_with_a_name(tmp_path, error, words):
    def train(cfg: Any, folder: Path) -> Any:
        raise error

    with pytest.raises(RankFailed, match=f"rank 0 failed: {words}"):
        in_place(tmp_path, train)
    assert outcome(tmp_path)["status"] == "failed"


@pytest.mark.parametrize("fails", [False, True])
def test_in_place_leaves_environment_handlers_and_logging_as_they_were(tmp_path, fails):
    def state() -> list[Any]:
        root, numbers = logging.getLogger(), signal.valid_signals() - {signal.SIGKILL}
        handlers = {number: signal.getsignal(number) for number in numbers}
        return [os.environ.copy(), handlers, root.level, [*root.handlers], dist.is_initialized()]

    def train(cfg: Any, folder: Path) -> dict[str, Any]:
        assert state()[1:] != before[1:]
        if fails:
            raise ArithmeticError
        return {"rank": os.environ["RANK"]}

    before = state()
    with pytest.raises(RankFailed) if fails else nullcontext():
        in_place(tmp_path, train)
    assert state() == before
    assert not faulthandler.unregister(signal.SIGUSR2)
