"""The config that a checkpoint holds, taken up to evaluate it: another width needs no repeating."""

from collections.abc import Iterable, Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from project import checkpoint
from project.errors import UserError

TRUSTED = (str(__package__), "torch.nn", "torchvision.models", "timm")


def adopt(cfg: DictConfig, overrides: Iterable[str]) -> None:
    """Gives `cfg` network, data and precision of the run that wrote `cfg.ckpt_path`, in place.

    What the command line says wins: a value (`data.root=...`), a whole group (`data=imagefolder`),
    or a recipe (`experiment=...`), which leaves nothing to take up.

    Args:
        overrides: the command line's.

    Raises:
        UserError: the checkpoint cannot be read, or its config names what is not trusted.
    """
    stored: Any = OmegaConf.create(checkpoint.read_run(cfg.ckpt_path)["config"])
    given = OverridesParser.create().parse_overrides(list(overrides))
    keys = {override.key_or_group for override in given}
    if "experiment" in keys:
        return
    own = cfg.copy()
    own_targets = {*_targets(OmegaConf.to_container(own))}
    for group in sorted({"model", "data"} - keys):
        for target in {*_targets(OmegaConf.to_container(stored[group]))} - own_targets:
            _check_trust(target, cfg)
        cfg[group] = stored[group]
    cfg.trainer.precision = stored.trainer.precision
    for override in given:
        key = override.key_or_group
        if key.startswith(("model.", "data.")) and not override.is_delete():
            OmegaConf.update(cfg, key, OmegaConf.select(own, key), force_add=True)
        elif key == "trainer.precision":
            cfg.trainer.precision = own.trainer.precision


def _targets(node: Any) -> Iterator[str]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    if isinstance(node, dict) and "_target_" in node:
        yield node["_target_"]
    for child in children:
        yield from _targets(child)


def _check_trust(target: str, cfg: DictConfig) -> None:
    """Refuses what is not defined in a trusted package: `project.pack.shutil.rmtree` is not."""
    packages = (*TRUSTED, *cfg.trusted)

    def is_within(name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in packages)

    if not (is_within(target) and is_within(getattr(get_object(target), "__module__", ""))):
        raise UserError(
            f"ckpt_path={cfg.ckpt_path} wants to build {target}, which is of no trusted package.\n"
            f"If you trust it: trusted=[{target.split('.')[0]}]. Or choose model=... and data=..."
        )
