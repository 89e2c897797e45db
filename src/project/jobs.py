"""The jobs of a sweep as folders: written before they run, read at any time."""

from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from project.errors import UserError
from project.files import read_csv, write_bytes, write_json
from project.folder import is_in_use, read_results

# What reading a damaged file comes to.
DAMAGE = (OSError, ValueError, TypeError, AttributeError, YAMLError, OmegaConfBaseException)

UNFINISHED = ["running", "interrupted", "waiting"]  # states of a job

Files = dict[str, str]  # names in .hydra, and texts


class Job(NamedTuple):
    """A job of a sweep.

    Args:
        number: of the job, and the name of its folder.
        words: of the command line that repeats it.
        status: complete, preempted, pruned, failed, running, interrupted or waiting.
        results: content of its `results.json`.
        history: rows of its `metrics.csv`, one an epoch; of a job that is not complete, too.
    """

    number: int
    words: list[str]
    status: str
    results: dict[str, Any]
    history: list[dict[str, float]]

    @property
    def values(self) -> dict[str, str]:
        """Its words as keys and values."""
        pairs = (word.lstrip("+").partition("=") for word in self.words)
        return {key: value for key, _, value in pairs}


def config_dir(sweep: Any) -> list[str]:
    """The option `--config-dir` with which a sweep was composed, by its `multirun.yaml`."""
    sources = sweep.hydra.runtime.config_sources
    return [f"--config-dir={s.path}" for s in sources if s.provider == "command-line"]


def read_job(folder: Path) -> Job:
    """A job as it stands; one whose files are damaged has failed."""
    words: list[str] = []
    history: list[dict[str, float]] = []
    try:
        stored = OmegaConf.load(folder / ".hydra" / "overrides.yaml")
        if not isinstance(stored, ListConfig):
            raise ValueError("overrides.yaml holds no list")
        words = [str(word) for word in stored]
        results, rows = read_results(folder), read_csv(folder / "metrics.csv")
        history = [{name: float(text or "nan") for name, text in row.items()} for row in rows]
    except (UserError, *DAMAGE) as error:
        results = {"status": "failed", "reason": f"damaged: {error}"}
    status = "interrupted" if (folder / "ranks").exists() else "waiting"
    status = "running" if is_in_use(folder) else results.get("status", status)
    if results.get("reason", "").startswith("pruned"):
        status = "pruned"
    return Job(int(folder.name), words, status, results, history)


def write_job(folder: Path, words: list[str], files: Files | str) -> None:
    """Writes a job that is to run.

    Args:
        words: that compose it.
        files: what Hydra writes, `config.yaml` last; or why it cannot be composed.
    """
    where = folder / ".hydra"
    write_bytes(where / "overrides.yaml", OmegaConf.to_yaml(words).encode())
    if isinstance(files, str):
        write_json(folder / "results.json", {"status": "failed", "reason": files})
    else:
        for name, text in files.items():
            write_bytes(where / name, text.encode())


def write_pruned(folder: Path, epoch: int) -> None:
    """Leaves word that a job was ended early, with the metrics that it had."""
    row = read_csv(folder / "metrics.csv")[-1]
    metrics = {name: float(value) for name, value in row.items() if "/" in name and value}
    stopped = {"status": "preempted", "reason": f"pruned after epoch {epoch}", "signal": 15}
    write_json(folder / "results.json", stopped | metrics)


def is_composed(folder: Path) -> bool:
    """Whether a job has its config, which is the last that is written."""
    return (folder / ".hydra" / "config.yaml").exists()


def is_written(folder: Path) -> bool:
    """Whether it has that, or what is wrong with it."""
    return is_composed(folder) or (folder / "results.json").exists()
