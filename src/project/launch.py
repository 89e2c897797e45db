"""A run: its folder, its ranks under torchrun's agent, its results and exit status.

The process that the user starts never becomes a rank. It composes the config, lets torchrun's
agent start the ranks from a fork server, waits for them and reports.
"""

import contextlib
import functools
import itertools
import json
import logging
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from project.errors import UserError
from project.files import write_json
from project.rank import Train, cause_of, rank_process, run_rank

RANKS_PER_CORE = 4  # on CPUs; more is a typing error, and would drown the machine


class RankFailed(Exception):
    """A rank ended a job; the message holds its traceback."""


def start(main: Callable[[], Any], train: Train) -> None:
    """The entry of train.py: runs Hydra's `main` in the right process.

    Under torchrun rank 0 alone composes the config; the others wait for the folder of its run.
    """
    if not dist.is_torchelastic_launched():
        multiprocessing.forkserver.set_forkserver_preload(["project.preload"])
        multiprocessing.forkserver.ensure_running()  # imports while this process composes
        main()
    elif {"-m", "--multirun"} & set(sys.argv):
        sys.exit("A sweep starts ranks of its own: python train.py -m ..., without torchrun.")
    elif os.environ["RANK"] == "0":
        try:
            main()
        finally:  # after --help, say, the others need not wait
            if not _launcher_store().check(["folder"]):
                _launcher_store().set("folder", "")
    elif folder := _launcher_store().get("folder").decode():
        _run_in_place(Path(folder), train, _launcher_store())


def run_job(train: Train) -> None:
    """Runs the job that Hydra has composed; the one place where errors become messages."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        results = run(folder, train)
    except (UserError, RankFailed) as error:
        sys.exit(f"train.py: {error}")
    except SignalException as stopped:
        write_json(folder / "results.json", {"status": "failed", "reason": str(stopped)})
        sys.exit(128 + stopped.sigval)
    shown = [f"{k} {v:.4f}" for k, v in results.items() if k.split("/")[-1] in ("acc", "loss")]
    if os.environ.get("RANK", "0") == "0":
        print("  ".join([*shown, f"{results['seconds']} s", f"in {os.path.relpath(folder)}"]))


def run(folder: Path, train: Train) -> dict[str, Any]:
    """Trains the run in `folder` on as many ranks as its config says.

    Returns:
        the content of `results.json`, with status "complete".

    Raises:
        UserError: the config asks for what cannot be.
        RankFailed: a rank failed; `results.json` has status "failed" and the reason.
    """
    cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
    results = folder / "results.json"
    results.unlink(missing_ok=True)  # success is what this attempt writes
    num_ranks = num_local_ranks(cfg.trainer)
    try:
        if dist.is_torchelastic_launched():
            _check_world(num_ranks, cfg.trainer)
            _launcher_store().set("folder", str(folder))
            _run_in_place(folder, train, _launcher_store())
        elif cfg.launch.inplace:
            _run_alone(folder, train, num_ranks)
        elif cfg.trainer.num_nodes > 1:
            raise UserError("trainer.num_nodes > 1: start train.py with torchrun on every node.")
        else:
            _run_under_agent(folder, train, num_ranks)
    except (UserError, RankFailed) as error:
        reason = str(error).splitlines()[0]
        write_json(results, {"status": "failed", "reason": reason})
        raise
    return json.loads(results.read_text())


def num_local_ranks(trainer: DictConfig) -> int:
    """Ranks on this node: one a GPU, or on CPUs as many as `trainer.devices` says.

    Raises:
        UserError: the devices do not exist.
    """
    accelerator, devices = trainer.accelerator, trainer.devices
    num_gpus = torch.cuda.device_count()
    if accelerator in ("gpu", "cuda") and num_gpus == 0:
        raise UserError(f"trainer.accelerator={accelerator}: torch sees no GPU here (trainer=cpu?)")
    if accelerator == "cpu" or num_gpus == 0:
        limit = RANKS_PER_CORE * (os.cpu_count() or 1)
        devices = 1 if devices == "auto" else devices
        if not isinstance(devices, int) or not 1 <= devices <= limit:
            raise UserError(f"trainer.devices={devices}: on this CPU choose 1 to {limit} ranks.")
        return devices
    chosen = range(num_gpus) if devices in ("auto", -1) else devices
    chosen = range(chosen) if isinstance(chosen, int) else chosen
    if not isinstance(chosen, range | ListConfig) or not chosen:
        raise UserError(f"trainer.devices={devices}: give a number, a list of GPUs, -1 or auto.")
    if not set(chosen) <= set(range(num_gpus)) or len(set(chosen)) < len(chosen):
        raise UserError(f"trainer.devices={devices}: there are {num_gpus} GPUs here, from 0.")
    return len(chosen)


def unused_folder(path: str) -> str:
    """Makes the first of `path`, `path-1`, `path-2`, ... that nobody has, and returns it.

    A Hydra resolver: two runs that start in the same second never share a folder.
    """
    for number in itertools.count():
        folder = Path(f"{path}-{number}" if number else path)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return str(folder)
    raise AssertionError("unreachable")


OmegaConf.register_new_resolver("unused_folder", unused_folder, use_cache=True, replace=True)


def _run_under_agent(folder: Path, train: Train, num_ranks: int) -> None:
    with tempfile.TemporaryDirectory() as logs, _signal_handlers_kept():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # not the host's name, which need not resolve
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, rank_process)(str(folder), train)
        except ChildFailedError as error:
            raise _first_failure(folder, error) from None


def _first_failure(folder: Path, error: ChildFailedError) -> Exception:
    """What ended the job: a rank that died without a word, or the first one to report."""
    rank, failure = error.get_first_failure()
    reports = {path: json.loads(path.read_text()) for path in folder.glob("ranks/*.json")}
    if not any(path.name.startswith(f"{rank}-") for path in reports):
        signal_name = f" ({failure.signal_name()})" if failure.exitcode < 0 else ""
        return RankFailed(f"rank {rank} ended with status {failure.exitcode}{signal_name}.")
    first, report = min(reports.items(), key=lambda item: item[1]["time"])
    if report["traceback"] is None:
        return UserError(report["error"])
    rank = first.name.split("-")[0]
    return RankFailed(f"rank {rank} failed: {report['error']}\n\n{report['traceback']}")


def _run_alone(folder: Path, train: Train, num_ranks: int) -> None:
    """Trains in this process, for debuggers, in the environment of a single rank."""
    if num_ranks > 1:
        raise UserError(f"launch.inplace trains one rank, but trainer.devices asks for {num_ranks}.")
    names = "RANK LOCAL_RANK GROUP_RANK TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"
    before = os.environ.copy()
    os.environ.update(dict.fromkeys(names.split(), "0"), TORCHELASTIC_RUN_ID="inplace")
    os.environ.update(WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", GROUP_WORLD_SIZE="1")
    try:
        _run_in_place(folder, train, dist.HashStore())
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_in_place(folder: Path, train: Train, store: dist.Store) -> None:
    """Trains as a rank in this process; `record` tells an outside torchrun of a failure."""
    try:
        record(run_rank)(folder, train, store)
    except Exception as error:
        raise cause_of(error) or error from None


@functools.cache
def _launcher_store() -> dist.Store:
    """Where the ranks of an outside torchrun meet."""
    store, _, _ = next(iter(dist.rendezvous("env://")))
    return store


def _check_world(num_ranks: int, trainer: DictConfig) -> None:
    asked = num_ranks * trainer.num_nodes
    world_size = int(os.environ["WORLD_SIZE"])
    if asked != world_size or num_ranks != int(os.environ["LOCAL_WORLD_SIZE"]):
        raise UserError(
            f"trainer.devices={trainer.devices} × trainer.num_nodes={trainer.num_nodes} are "
            f"{asked} ranks, but torchrun started {world_size}."
        )


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """The agent installs signal handlers, and leaves them, and logs what we tell in one line."""
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    before = {number: signal.getsignal(number) for number in signals}
    agent = logging.getLogger("torch.distributed")
    agent.addHandler(quiet := logging.NullHandler())
    agent.propagate = False
    try:
        yield
    finally:
        agent.removeHandler(quiet)
        agent.propagate = True
        for number, handler in before.items():
            signal.signal(number, handler)
