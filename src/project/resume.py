"""`resume=FOLDER`: the run in a folder, its own config, values of the command line on top."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from project.checkpoint import LAST, begun, read_run
from project.cli import as_word
from project.devices import num_local_ranks
from project.errors import UserError
from project.files import write_bytes
from project.folder import LOCK, in_use, read_results
from project.jobs import DAMAGE, config_dir
from project.schema import check_knobs

# Words about a sweep that may change while it is stopped.
HOW_TO_SWEEP = ("hydra.launcher.", "hydra/launcher=", "hydra.sweeper.")


def resumed(words: list[str]) -> Path | None:
    """The folder that a command line asks to go on with, None if it composes a new run.

    Raises:
        UserError: the folder holds no run, or the words beside it are no values.
    """
    given = [word.partition("=")[2] for word in words if _is_resume(word)]
    if not given or {"--help", "-h"} & {*words}:
        return None
    folder = Path(_unquoted(given[-1]) or "?")
    if options := [word for word in words if word.startswith("-")]:
        raise UserError(f"resume={folder} takes values only, not {options[0]}.")
    if not is_sweep(folder) and not (folder / ".hydra" / "config.yaml").exists():
        there = "holds no run" if folder.is_dir() else "is not there"
        raise UserError(f"resume={folder}: this folder {there}.")
    return folder.absolute()


def take_up(folder: Path, words: list[str], groups: Path) -> Callable[[], None] | None:
    """Makes a folder ready to go on with the values of a command line.

    Args:
        groups: folder of the config groups.

    Returns:
        what takes this back, as long as no checkpoint has been written since; None if the run is
        complete and the values ask for no further step: then no byte has changed.

    Raises:
        UserError: a value cannot be.
    """
    path = folder / ".hydra" / "config.yaml"
    try:
        then: Any = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged ({error}).") from None
    if not isinstance(then, DictConfig) or {"seed", "data", "trainer", "launch"} - {*then}:
        raise UserError(f"{path} is damaged, or not of a run of ours.")
    words = [word for word in words if not _is_resume(word)]
    now = _with_values(then, words, groups)
    check_knobs(now)
    num_local_ranks(now.trainer)
    results = read_results(folder)
    if results.get("status") == "complete" and not _asks_for_more(then, now, results, folder):
        return None
    overrides = folder / ".hydra" / "overrides.yaml"
    files = [path, overrides, folder / "results.json"]
    before = {file: file.read_bytes() for file in files if file.exists()}
    last = folder / LAST
    written = last.stat().st_mtime_ns if last.exists() else None

    def undo() -> None:
        if (last.stat().st_mtime_ns if last.exists() else None) == written:
            for file, content in before.items():
                write_bytes(file, content)

    if words:
        earlier = OmegaConf.load(overrides) if overrides.exists() else []
        for file, content in (path, now), (overrides, OmegaConf.create([*earlier, *words])):
            write_bytes(file, OmegaConf.to_yaml(content).encode())
    (folder / "results.json").unlink(missing_ok=True)
    return undo


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds the jobs of a sweep."""
    return (folder / "multirun.yaml").exists()


def take_up_sweep(folder: Path, words: list[str], groups: Path) -> list[str]:
    """Makes the jobs of a sweep ready to go on; those that are missing are composed with it.

    Args:
        groups: folder of the config groups.

    Returns:
        the words that compose the sweep again.

    Raises:
        UserError: a value cannot be, or is one that the sweep varies.
    """
    try:
        sweep: Any = OmegaConf.load(folder / "multirun.yaml")
        then = [*sweep.hydra.overrides.hydra, *sweep.hydra.overrides.task]
        swept, options = {*(sweep.hydra.sweeper.params or {})}, config_dir(sweep)
    except DAMAGE as error:
        raise UserError(f"{folder / 'multirun.yaml'} is damaged ({error}).") from None
    words = [word for word in words if not _is_resume(word)]
    values = [word for word in words if not word.lstrip("+~").startswith("hydra")]
    for word in {*words} - {*values}:
        if not word.lstrip("+~").startswith(HOW_TO_SWEEP):
            raise UserError(f"{word} is for new sweeps.")
    if values and (folder / "study.db").exists():
        raise UserError(f"{values[0]}: the trials of a study are compared under one config.")
    parsed = OverridesParser.create().parse_overrides(then)
    swept |= {override.key_or_group for override in parsed if override.is_sweep_override()}
    for override in OverridesParser.create().parse_overrides(values):
        if override.key_or_group in swept:
            raise UserError(f"{override.input_line}: this sweep varies {override.key_or_group}.")
    with in_use(folder, LOCK):
        _take_up_all(folder.glob("*/.hydra/config.yaml") if values else (), values, groups)
    own = "hydra.sweep.dir", "hydra.sweeper.resume"
    then = [word for word in then if word.lstrip("+").partition("=")[0] not in own]
    place = as_word("hydra.sweep.dir", str(folder))
    return [*options, "-m", *then, *words, place, "hydra.sweeper.resume=true"]


def _take_up_all(configs: Iterable[Path], values: list[str], groups: Path) -> None:
    """All of the jobs, or none."""
    undos = []
    try:
        for path in configs:
            with in_use(path.parents[1]):
                undos.append(take_up(path.parents[1], values, groups))
    except BaseException:
        for undo in filter(None, undos):
            undo()
        raise


def _is_resume(word: str) -> bool:
    return word.lstrip("+").startswith("resume=")


def _unquoted(value: str) -> str:
    """A value of the command line, of which Hydra's quotes are taken off."""
    if value[:1] not in ("'", '"'):
        return value
    return str(OverridesParser.create().parse_override(f"resume={value}").value())


def _with_values(then: DictConfig, words: list[str], groups: Path) -> DictConfig:
    overrides = OverridesParser.create().parse_overrides(words)
    for override in overrides:
        key = override.key_or_group
        if (groups / key).is_dir():
            raise UserError(
                f"{override.input_line}: resume keeps the choices of the run. Give values, such "
                f"as {key}.NAME=VALUE, or begin a new run (weights=FILE, ckpt_path=FILE)."
            )
        if key.partition(".")[0] == "hydra" or override.is_sweep_override():
            raise UserError(f"{override.input_line} is for new runs, resume goes on with one.")
    now = then.copy()
    OmegaConf.set_struct(now, True)
    ConfigLoaderImpl._apply_overrides_to_config(overrides, now)
    OmegaConf.set_struct(now, False)
    return now


def _asks_for_more(
    then: DictConfig, now: DictConfig, results: dict[str, Any], folder: Path
) -> bool:
    """Whether a complete run has steps left to train, or a test to take, under its new config."""
    if not now.fit:
        return False
    if now.test and "test/acc" not in results:
        return True
    (epochs_then, steps_then), (epochs, steps) = _limits(then), _limits(now)
    if epochs <= epochs_then and steps <= steps_then:
        return False
    start = begun(folder)
    if start is None:
        raise UserError(f"{folder} has no checkpoints/last.ckpt to go on from.")
    stored = read_run(start, "resume")
    record = stored["callbacks"]["RunRecord"]
    done = len(record["history"]) - record["is_cut"]
    return done < epochs and stored["global_step"] < steps


def _limits(cfg: DictConfig) -> tuple[float, float]:
    limits = cfg.trainer.get("max_epochs"), cfg.trainer.get("max_steps")
    epochs, steps = (float("inf") if n is None or n < 0 else n for n in limits)
    return epochs, steps
