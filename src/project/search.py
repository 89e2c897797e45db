"""A search by Optuna: jobs come from a study in the sweep's folder, and their metric goes to it.

The words are those of the plugin hydra-optuna-sweeper, whose releases want Optuna 2.
"""

import functools
import pickle
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from hydra.utils import instantiate
from omegaconf import DictConfig

from project.cli import MISTAKES, reason
from project.console import say
from project.errors import UserError
from project.files import write_bytes
from project.jobs import Files, is_written, read_job, write_job, write_pruned
from project.pruning import pruned
from project.search_space import distribution
from project.sweep import is_maximized
from project.sweeper import GridSweeper, Planned

if TYPE_CHECKING:
    import optuna

    from project.parallel import Share


class OptunaSweeper(GridSweeper):
    """As many jobs as a study asks for; a job's number is its trial's.

    Args:
        n_trials: of the study in all, those that it has from earlier calls included.
        sampler: a config of a sampler of Optuna.
        pruner: a config of a pruner, None: no job is ended early.
    """

    retries = False

    def __init__(
        self,
        n_trials: int,
        sampler: DictConfig | None = None,
        pruner: DictConfig | None = None,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.num_jobs, self.sampler, self.pruner = n_trials, sampler, pruner

    def jobs(self, folder: Path, overrides: list[Override]) -> Iterator[Planned]:
        """Interrupted jobs of the study in `folder`, then new ones, asked for one by one.

        Raises:
            UserError: Optuna is not installed, or the folder holds another sweep.
        """
        try:
            import optuna
            from sqlalchemy.exc import DatabaseError
        except ImportError:
            raise UserError('Optuna is not installed: pip install -e ".[optuna]"') from None
        path = folder / "study.db"
        if (folder / "multirun.yaml").exists() and not path.exists():
            raise UserError(f"{folder} holds another sweep. Choose another folder.")
        if not isinstance(self.num_jobs, int) or self.num_jobs < 1:
            raise UserError(f"hydra.sweeper.n_trials={self.num_jobs} must be a number from 1.")
        self.metric = self._config.optimized_metric
        fixed = {
            o.get_key_element(): o.get_value_element_as_str()
            for o in overrides
            if not o.is_sweep_override()
        }
        space = {o.get_key_element(): distribution(o) for o in overrides if o.is_sweep_override()}
        if not space:
            raise UserError("Nothing to search. Give words, as 'optimizer.lr=interval(0.1,1)'")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # By a function and not by a URL, in which a path may mean something else.
        connect = functools.partial(sqlite3.connect, path, timeout=60, check_same_thread=False)
        sampler = self._sampler(folder / "sampler.pkl")
        pruner = instantiate(self.pruner) if self.pruner else optuna.pruners.NopPruner()
        if self.metric.startswith("test/") and not isinstance(pruner, optuna.pruners.NopPruner):
            raise UserError(f"optimized_metric={self.metric}: a pruner needs one of each epoch.")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._study = optuna.create_study(
                study_name="sweep",
                storage=optuna.storages.RDBStorage("sqlite:///", {"creator": connect}),
                load_if_exists=True,
                sampler=sampler,
                pruner=pruner,
                direction="maximize" if is_maximized(self.metric, self.direction) else "minimize",
            )
        except DatabaseError as error:
            raise UserError(f"{path} is damaged, or cannot be written: {error.orig}.") from error
        words = fixed | {key: str(value) for key, value in space.items()}
        if words != self._study.user_attrs.get("words", words):
            raise UserError(f"{folder} holds a study of other words. Choose another folder.")
        self._study.set_user_attr("words", words)
        return self._asked(folder, fixed, space)

    def _sampler(self, path: Path) -> "optuna.samplers.BaseSampler | None":
        """As it was after the suggestion of the latest job, so that a study goes on undisturbed.

        Pickled, as Optuna's FAQ has it ("How can I save and resume studies?").
        """
        new = instantiate(self.sampler) if self.sampler else None
        if not path.exists():
            return new
        try:
            job, before, after = pickle.loads(path.read_bytes())
            earlier = pickle.loads(after if is_written(path.parent / job) else before)
        except Exception as error:  # whatever unpickling comes to
            said = f"{path} is damaged ({type(error).__name__}: {error})."
            raise UserError(f"{said} Without it the sampler starts anew.") from error
        return earlier if new is None or type(earlier) is type(new) else new

    def _asked(
        self, folder: Path, fixed: dict[str, str], space: dict[str, Any]
    ) -> Iterator[Planned]:
        from optuna.trial import TrialState

        running, num_asked = [], 0
        for trial in self._study.get_trials(deepcopy=False):
            if is_written(folder / str(trial.number)):
                running += [trial] if trial.state == TrialState.RUNNING else []
            elif trial.state == TrialState.RUNNING:
                # Killed while it was asked: it may lack values, and the sampler is as before it.
                self._study.tell(trial.number, state=TrialState.FAIL)
                continue
            elif trial.state == TrialState.FAIL:
                continue
            num_asked += 1
        if num_asked >= self.num_jobs and not running:
            say(f"the study has {num_asked} trials (hydra.sweeper.n_trials={self.num_jobs})")
        for trial in running:
            yield self._job(folder, trial, fixed)
        while num_asked < self.num_jobs and not self._study.user_attrs.get("is_done"):
            before = pickle.dumps(self._study.sampler)
            try:
                trial = self._study.ask(space)
            except ValueError as error:
                raise UserError(f"hydra.sweeper.sampler: {error}") from error
            num_asked += 1
            states = str(trial.number), before, pickle.dumps(self._study.sampler)
            write_bytes(folder / "sampler.pkl", pickle.dumps(states))
            yield self._job(folder, trial, fixed)

    def _job(self, folder: Path, trial: Any, fixed: dict[str, str]) -> Planned:
        job = folder / str(trial.number)
        values = fixed | {key: str(value) for key, value in trial.params.items()}
        words = [f"{key}={value}" for key, value in values.items()]
        if not is_written(job):
            try:
                files: Files | str = self.composed(job, words)
            except MISTAKES as error:
                files = reason(error)
            write_job(job, words, files)
        return job, words

    def run_one(self, job: Path, words: Sequence[str], share: "Share | None" = None) -> int:
        """Runs a trial, and tells the study what came of it."""
        import optuna

        number, state = int(job.name), optuna.trial.TrialState
        with pruned(self._study, job, self.metric) as verdict:
            status = super().run_one(job, words, share)
        results = read_job(job).results  # of one whose files are damaged: failed
        value = results.get(self.metric)
        if verdict and results.get("status") != "failed":
            say(f"job {number} pruned after epoch {verdict[0]}")
            write_pruned(job, verdict[0])
            self._tell(number, state=state.PRUNED)
            return 0
        if status >= 128:
            return status  # its trial goes on when the study does
        if results.get("status") == "complete" and value is not None:
            self._tell(number, value)
            return status
        self._tell(number, state=state.FAIL)
        if results.get("status") == "complete" and self.metric not in results:
            raise UserError(f"optimized_metric={self.metric}: results have {_metrics(results)}.")
        return status

    def _tell(self, number: int, value: float | None = None, state: Any = None) -> None:
        try:
            self._study.tell(number, value, state)
        except RuntimeError as error:
            # How samplers of a finite grid say that it is done; the trial has been told.
            # https://github.com/optuna/optuna/issues/5141
            if "Study.stop" not in str(error):
                raise
            self._study.set_user_attr("is_done", True)


def _metrics(results: dict[str, Any]) -> str:
    return ", ".join(name for name in results if "/" in name)
