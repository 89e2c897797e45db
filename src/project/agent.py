"""Ranks of a job under torchrun's agent, started from a fork server."""

import contextlib
import logging
import multiprocessing.forkserver
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from project.errors import RankFailed
from project.failure import first_failure
from project.rank import Train, rank_process


def start_fork_server() -> None:
    """Starts the process that ranks are forked from; it imports what they need."""
    multiprocessing.forkserver.set_forkserver_preload(["project.preload"])
    multiprocessing.forkserver.ensure_running()


def end_fork_server() -> None:
    """It would finish its imports first, and keep open the pipe into which `--help` was printed."""
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)


def run_ranks(folder: Path, train: Train, num_ranks: int, attempt: int = 0) -> None:
    """Runs `train` on ranks of this machine until all have ended.

    Args:
        attempt: number of this launch in the folder, for the names of logs.

    Raises:
        SignalException: this process was asked to stop; the ranks have stopped.
        UserError: a rank found a mistake in the config.
        RankFailed: the first rank that failed, and how.
    """
    with tempfile.TemporaryDirectory() as logs, contained():
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
            **_but_for_nohup(),
        )
        try:
            elastic_launch(config, rank_process)(str(folder), train, attempt)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            has_reported = any(folder.glob(f"ranks/{rank}-*.json"))
            message: Any = failure.message  # text, or a report of torch's
            message = message.get("message") if isinstance(message, dict) else message
            name = failure.signal_name() if failure.exitcode < 0 else message
            died = RankFailed(f"rank {rank} ended with status {failure.exitcode} ({name})")
            raise (has_reported and first_failure(folder)) or died from None
        finally:
            for path in folder.glob("ranks/*.pid"):  # of ranks that were killed
                path.unlink()


def _but_for_nohup() -> dict[str, Any]:
    """The agent would handle SIGHUP even where nohup has it ignored (torch 2.8 and later ask)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    can_say = "signals_to_handle" in LaunchConfig.__dataclass_fields__
    return {"signals_to_handle": "SIGTERM,SIGINT,SIGQUIT"} if ignored and can_say else {}


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """The agent leaves its signal handlers behind, and logs at length what we say in one line."""
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    before = {number: signal.getsignal(number) for number in signals}
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in before.items():
            signal.signal(number, handler)
