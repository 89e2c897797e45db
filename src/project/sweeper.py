"""Sweeps: each combination of values becomes the folder of a run.

All are composed before the first begins: to edit a config file meanwhile changes no job.
"""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from project import outside, signals
from project.cli import MISTAKES, quoted, reason
from project.console import say
from project.errors import Preempted, UserError
from project.files import write_bytes
from project.folder import LOCK, in_use, read_results, shown
from project.jobs import UNFINISHED, Files, is_composed, write_job
from project.sweep import summarise

if TYPE_CHECKING:
    from project.parallel import Share

Planned = tuple[Path, list[str]]  # a job's folder, its words
MANY = 40  # jobs, whose composition takes seconds


class GridSweeper(Sweeper):
    """Every combination of the swept values, in the order of Hydra's own sweeper.

    Args:
        params: values to sweep, as on the command line, which has the last word.
        direction: of `optimized_metric`, "maximize" or "minimize"; None: by its name.
        resume: go on with the sweep in the folder.
    """

    retries = True  # whether a sweep that goes on runs its failed jobs again
    work: Callable[..., int]  # runs the job in a folder, with its share; its exit status

    def __init__(
        self,
        params: dict[str, Any] | None = None,
        direction: str | None = None,
        resume: bool = False,
    ) -> None:
        self.params, self.direction, self.resume = params or {}, direction, resume

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        """Gets what Hydra has composed; jobs are runs in folders, not calls of `task_function`."""
        self._loader, self._config = hydra_context.config_loader, config

    def sweep(self, arguments: list[str]) -> None:
        """Runs all jobs that these words ask for, whether or not some fail; shows the summary.

        Raises:
            SystemExit: a job failed (1), or the sweep was asked to stop (130 or 143).
            UserError: no job can be composed.
        """
        self._check()
        folder = Path(self._config.hydra.sweep.dir).absolute()
        parser = OverridesParser.create(config_loader=self._loader)
        words = [f"{key}={values}" for key, values in self.params.items()]
        try:
            parsed = parser.parse_overrides([*words, *arguments])
            last = {override.get_key_element(): override for override in parsed}
            self._swept = {key for key, override in last.items() if override.is_sweep_override()}
            jobs = self.jobs(folder, [*last.values()])
        except BaseException:
            with contextlib.suppress(OSError):
                folder.rmdir()  # made, and nothing put into it
            raise
        with in_use(folder, LOCK):
            write_bytes(folder / "multirun.yaml", OmegaConf.to_yaml(self._config).encode())
            say(f"sweep folder {shown(folder)}")
            stopped = 0
            try:
                stopped = self.run(jobs)
            except Preempted as error:  # between two jobs
                stopped = error.status
            finally:
                statuses = summarise(folder)
        over = ["complete", "pruned", "preempted", *(UNFINISHED if stopped else [])]
        failed = [str(number) for number, status in statuses.items() if status not in over]
        if stopped or failed:
            said = f"failed: {', '.join(failed)}" if failed else "the sweep has stopped"
            go_on = f" Go on with: python train.py {quoted('resume', shown(folder))}"
            say(f"train.py: {said}.{go_on if stopped or self.retries else ''}", sys.stderr)
            sys.exit(stopped or 1)

    def _check(self) -> None:
        with signals.held():
            from project.parallel import num_at_once
        self._at_once = num_at_once(self._config.hydra.launcher)
        if outside.is_launched():
            raise UserError("A sweep starts ranks of its own: python train.py -m ..., no torchrun.")
        if not isinstance(metric := self._config.optimized_metric, str):
            raise UserError(f"optimized_metric={metric} is not of type str.")
        if self.direction not in (None, "maximize", "minimize"):
            raise UserError(f"hydra.sweeper.direction={self.direction}: maximize or minimize.")
        place: Any = OmegaConf.to_container(self._config.hydra.sweep)  # unresolved
        if place["subdir"] != "${hydra.job.num}":
            raise UserError("hydra.sweep.subdir: the folder of a job is its number.")

    def jobs(self, folder: Path, overrides: list[Override]) -> Iterator[Planned]:
        """Composes all jobs but for those in the folder; the iterator writes, then yields them.

        Raises:
            Exception: one of MISTAKES, if not one job can be composed.
        """
        for override in overrides:
            if override.is_interval_sweep():
                raise UserError(f"{override.input_line}: hparams_search=optuna takes intervals.")
        random.seed(0)  # of shuffle(...): a sweep that goes on has the same order
        [combinations] = BasicSweeper.split_arguments(overrides, None)
        jobs: list[Planned] = [(folder / str(n), words) for n, words in enumerate(combinations)]
        self.num_jobs = len(jobs)
        if not jobs:
            raise UserError("These words ask for no job.")
        if len(jobs) > MANY:
            say(f"composing {len(jobs)} jobs")
        new: dict[Path, Any] = {}
        for job, words in (job for job in jobs if not is_composed(job[0])):
            try:
                new[job] = self.composed(job, words)
            except MISTAKES as error:
                new[job] = error
        errors = [error for error in new.values() if isinstance(error, Exception)]
        if errors and len(errors) == len(jobs):
            raise errors[0]
        return self._written(jobs, new)

    def _written(self, jobs: list[Planned], new: dict[Path, Any]) -> Iterator[Planned]:
        for job, words in jobs:
            files = new.pop(job, None)
            if isinstance(files, Exception):
                files = reason(files)
                say(f"train.py: job {job.name} cannot be composed: {files}", sys.stderr)
            if files:
                write_job(job, words, files)
        yield from jobs

    def composed(self, job: Path, words: list[str]) -> Files:
        """What Hydra writes for a job.

        Raises:
            Exception: one of MISTAKES.
        """
        config = self._loader.load_sweep_config(self._config, words)
        with open_dict(config), read_write(config.hydra):
            config.hydra.job.id = config.hydra.job.num = int(job.name)
            config.hydra.runtime.output_dir = str(job)
        hydra = OmegaConf.to_yaml(OmegaConf.create({"hydra": config.hydra}))
        with open_dict(config), read_write(config):
            del config["hydra"]
        return {"hydra.yaml": hydra, "config.yaml": OmegaConf.to_yaml(config)}

    def run(self, jobs: Iterator[Planned]) -> int:
        """Runs all jobs; 0, or the status with which a request to stop ended one."""
        count = min(self._at_once, self.num_jobs)
        if count > 1:
            from project.parallel import Share, run_at_once

            share = Share(count)
            return run_at_once(jobs, count, lambda job: self.run_one(*job, share))
        for job, words in jobs:
            status = self.run_one(job, words)
            if status >= 128:
                return status
            if signals.asked():  # at its last moment
                return Preempted(signals.asked()).status
        return 0

    def run_one(self, job: Path, words: Sequence[str], share: "Share | None" = None) -> int:
        """Runs a job, unless it is complete or cannot be composed; its exit status."""
        own = [word for word in words if word.partition("=")[0] in self._swept]
        say(f"job {job.name} of {self.num_jobs}: {' '.join(own or words)}")
        try:
            results = read_results(job)
            if results.get("status") == "complete":
                say("already complete")
                return 0
            if not is_composed(job):
                raise UserError(results["reason"])
            return type(self).work(job, share=share)
        except (UserError, OSError) as error:  # also: its folder is in use, or cannot be written
            say(f"train.py: {error}", sys.stderr)
            return 1
