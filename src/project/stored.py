"""The config that a checkpoint holds, taken up to evaluate it: another width needs no repeating."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from project import checkpoint
from project.errors import UserError

# What a stored config may build from. Of this package only what makes networks and data: other
# modules write and delete files.
MODULES = ("model", "sources", "augment", "datamodule")
TRUSTED = [*(f"{__package__}.{name}" for name in MODULES), "torch.nn", "torchvision.models", "timm"]


def take_up_config(cfg: DictConfig, folder: Path) -> None:
    """Makes ready the config in `folder` for an evaluation: that of the run that wrote the file.

    Raises:
        UserError: no file is given; or see `adopt`.
    """
    if not cfg.ckpt_path and not cfg.weights:
        raise UserError("fit=false evaluates: give ckpt_path=FILE (of a run) or weights=FILE.")
    if cfg.ckpt_path:
        adopt(cfg, OmegaConf.load(folder / ".hydra" / "overrides.yaml"))
        OmegaConf.save(cfg, folder / ".hydra" / "config.yaml")


def adopt(cfg: DictConfig, overrides: Iterable[str]) -> None:
    """Gives `cfg` network, data and precision of the run that wrote `cfg.ckpt_path`, in place.

    What the command line says wins: a value (`data.root=...`), a whole group (`data=imagefolder`),
    or a recipe (`experiment=...`), which leaves nothing to take up.

    Args:
        overrides: the command line's.

    Raises:
        UserError: the checkpoint cannot be read, or its config would run what is not trusted.
    """
    stored = checkpoint.read_run(cfg.ckpt_path)["config"]  # plain: nothing in it is resolved
    given = OverridesParser.create().parse_overrides(list(overrides))
    keys = {override.key_or_group for override in given}
    if "experiment" in keys:
        return
    own = cfg.copy()
    for group in {"model", "data"} - keys:
        cfg[group] = stored[group]
    if "trainer.precision" not in keys:
        cfg.trainer.precision = stored["trainer"]["precision"]
    for override in given:
        key = override.key_or_group
        if key.startswith(("model.", "data.")) and not override.is_delete():
            OmegaConf.update(cfg, key, OmegaConf.select(own, key), force_add=True)
    _refuse_foreign_code(cfg, own)


def untrusted(cfg: DictConfig) -> list[str]:
    """Packages to trust before a checkpoint with this config can be evaluated."""
    targets = [value for key, value in _leaves(cfg) if key.endswith("._target_")]
    return sorted({target.split(".")[0] for target in targets if not _is_in(target, TRUSTED)})


def _refuse_foreign_code(cfg: DictConfig, own: DictConfig) -> None:
    """Refuses what can run code, unless the user's own config says the same.

    That is a `_target_`, which has to be defined in a trusted package (`...model.os.system` is
    not), and an interpolation, whose resolver can build anything.
    """
    own_leaves = set(_leaves(own))
    own_targets = {value for key, value in own_leaves if key.endswith("._target_")}
    for key, value in sorted(set(_leaves(cfg)) - own_leaves):
        if "${" in value:
            raise UserError(f"ckpt_path={cfg.ckpt_path} holds {key}={value}: give {key}=... here.")
        if not key.endswith("._target_") or value in own_targets:
            continue
        packages = [*TRUSTED, *cfg.trusted]
        if not (_is_in(value, packages) and _is_in(_home_of(value, cfg.ckpt_path), packages)):
            raise UserError(
                f"ckpt_path={cfg.ckpt_path} wants to build {value}, of no trusted package.\n"
                f"If you trust it: trusted=[{value.split('.')[0]}]. Or give model=... and data=..."
            )


def _leaves(cfg: DictConfig) -> Iterator[tuple[str, str]]:
    """Dotted keys and unresolved values, as text, of what `adopt` takes up."""

    def walk(key: str, node: Any) -> Iterator[tuple[str, str]]:
        pairs = enumerate(node) if isinstance(node, list) else ()
        for name, child in node.items() if isinstance(node, dict) else pairs:
            yield from walk(f"{key}.{name}", child)
        if not isinstance(node, dict | list):
            yield key, str(node)

    plain: Any = OmegaConf.to_container(cfg)
    parts = {"model": plain["model"], "data": plain["data"]}
    parts["trainer.precision"] = plain["trainer"].get("precision")
    for key, node in parts.items():
        yield from walk(key, node)


def _is_in(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _home_of(target: str, path: str) -> str:
    """The module that defines a target."""
    try:
        return getattr(get_object(target), "__module__", "")
    except (ImportError, ValueError) as error:
        raise UserError(f"ckpt_path={path} wants to build {target}, which is not there.") from error
