"""Jobs that fall behind are ended early, by a pruner of Optuna."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from project.files import read_csv
from project.processes import send

if TYPE_CHECKING:
    import optuna

SECONDS_BETWEEN = 0.2  # two looks at the metrics of a job


@contextlib.contextmanager
def pruned(study: "optuna.Study", job: Path, metric: str) -> Iterator[list[int]]:
    """Shows the study a metric after each epoch of a job, which ends at its pruner's word.

    All epochs count, also those that the job trains before it ends, so that the word of the pruner
    does not depend on the time at which somebody looks.

    Args:
        job: folder of a run; its name is the number of the trial.

    Returns:
        the epoch after which the pruner said so, if it did; complete when the context has ended.
    """
    import optuna

    verdict: list[int] = []
    frozen = study.get_trials(deepcopy=False)[int(job.name)]
    trial, ended = optuna.trial.Trial(study, frozen._trial_id), threading.Event()
    seen = {*frozen.intermediate_values}

    def look() -> None:
        for row in read_csv(job / "metrics.csv"):
            epoch, value = int(row["epoch"]), row.get(metric)
            if value and epoch not in seen and not verdict:
                seen.add(epoch)
                trial.report(float(value), epoch)
                if trial.should_prune():
                    verdict.append(epoch)

    def watch() -> None:
        while not ended.wait(SECONDS_BETWEEN) and not verdict:
            look()
            if verdict:
                send(signal.SIGTERM, job)

    watcher = threading.Thread(target=watch)
    if not isinstance(study.pruner, optuna.pruners.NopPruner):
        watcher.start()
    try:
        yield verdict
    finally:
        ended.set()
        if watcher.ident:
            watcher.join()
        look()
