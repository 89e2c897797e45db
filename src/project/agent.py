"""Ranks of a job under torchrun's agent, started from a fork server."""

import contextlib
import functools
import logging
import queue
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.elastic import metrics
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from project import signals
from project.errors import Preempted, RankFailed
from project.failure import first_report
from project.folder import read_results
from project.processes import send, sweep_up
from project.rank import Train, rank_process
from project.watchdog import Watchdog

SERVER_GONE = 255  # a rank's status, where nobody can tell it any more (popen_forkserver.py)
PATIENCE = 30.0  # seconds that ranks have to end once they are asked to

T = TypeVar("T")

_folders: list[Path] = []  # of the jobs whose ranks this process has started


def attended(work: Callable[[], T]) -> T:
    """Runs `work` in a thread, where torchrun's agent leaves signals alone, and waits for it.

    A request to stop goes to every rank, also to those that come up later, until `work` has ended.
    Ranks that take longer than PATIENCE are killed. A second request changes nothing.
    """
    events: queue.SimpleQueue[int] = queue.SimpleQueue()
    with signals.received(events.put), _silent_agent(), ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        future.add_done_callback(lambda _: events.put(0))
        if number := events.get():
            told: set[int] = set()
            patient_until = time.monotonic() + PATIENCE
            while not future.done():
                send(number, *_folders, told=told)
                if time.monotonic() > patient_until:
                    send(signal.SIGKILL, *_folders)
                with contextlib.suppress(queue.Empty):
                    events.get(timeout=0.1)
    return future.result()


def run_ranks(
    folder: Path,
    train: Train,
    num_ranks: int,
    timeout: float,
    attempt: int = 0,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs `train` on ranks of this machine until all have ended.

    In the main thread it answers requests to stop; elsewhere `attended` is for the caller.

    Args:
        timeout: seconds without a sign of life that end a rank.
        attempt: number of this launch in the folder, for the names of logs.
        environment: variables that only these ranks get; they then speak in `ranks/` alone.

    Raises:
        Preempted: this process was asked to stop; the ranks have stopped.
        UserError: a rank found a mistake in the config.
        RankFailed: the first rank that failed or makes no progress, and how.
    """
    work = functools.partial(_run_ranks, folder, train, num_ranks, timeout, attempt, environment)
    attended(work) if threading.current_thread() is threading.main_thread() else work()


def _run_ranks(
    folder: Path,
    train: Train,
    num_ranks: int,
    timeout: float,
    attempt: int,
    environment: Mapping[str, str] | None,
) -> None:
    _folders.append(folder)
    watch = Watchdog(folder, attempt, timeout, range(num_ranks))
    try:
        with tempfile.TemporaryDirectory() as logs, _Looks.often(watch):
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
            elastic_launch(config, rank_process)(str(folder), train, attempt, environment)
            return
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()  # no more: its traceback holds the agent's store
    except RankFailed:  # the watch has found it
        if signals.asked():
            raise Preempted(signals.asked()) from None
        raise
    finally:
        _folders.remove(folder)
        sweep_up(folder)
    if signals.asked():  # ranks that were stopped end like this
        raise Preempted(signals.asked())
    if read_results(folder).get("status") == "complete":  # but processes of ranks did not go
        return
    has_reported = any(folder.glob(f"ranks/{rank}-*.json"))
    message: Any = failure.message  # text, or a report of torch's
    message = message.get("message") if isinstance(message, dict) else message
    name = failure.signal_name() if failure.exitcode < 0 else message
    reason = f"rank {rank} ended with status {failure.exitcode} ({name})"
    if failure.exitcode == SERVER_GONE and not has_reported:
        reason = "the process that ranks are forked from is gone, and they with it"
    raise (has_reported and first_report(folder)) or RankFailed(reason)


class _Looks(metrics.MetricHandler):
    """Lets a watch look at the ranks between the agent's own looks, in the agent's thread.

    The agent sees statuses only, and waits for ever for the result of a rank that has left with
    status 0 (torch 2.14, MultiprocessContext._poll). A metric of its loop is where it calls us.
    """

    _mine = threading.local()

    @classmethod
    @contextlib.contextmanager
    def often(cls, watch: Watchdog) -> Iterator[None]:
        """For the agent that runs in this thread."""
        metrics.configure(cls(), "torchelastic")
        cls._mine.watch = watch
        try:
            yield
        finally:
            cls._mine.watch = None

    def emit(self, metric_data: metrics.MetricData) -> None:
        """Comes ten times a second.

        Raises:
            RankFailed: which ends the agent; the ranks are gone already.
        """
        watch = getattr(self._mine, "watch", None)
        if watch and metric_data.name.endswith(".remaining_restarts"):
            try:
                watch.look()
            except RankFailed:
                sweep_up(watch.folder)
                raise


@contextlib.contextmanager
def _silent_agent() -> Iterator[None]:
    """The agent logs at length what we say in one line."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
