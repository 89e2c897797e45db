"""Config values held against the constructors they are for: `_target_` is the schema."""

import difflib
import inspect
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from project.errors import UserError

# Values that no constructor takes; each with its type.
TOP_LEVEL: dict[str, Any] = {
    "seed": int,
    "fit": bool,
    "test": bool,
    "label_smoothing": float,
    "compile": bool,
    "ckpt_path": str | None,
    "weights": str | None,
    "trusted": list[str],
    "optimized_metric": str,
    "trainer.max_epochs": int | None,
    "trainer.max_steps": int | None,
    "checkpoint.every_n_steps": int | None,
    "checkpoint.every_minutes": float | None,
    "checkpoint.top_k": int,
    "launch.max_restarts": int,
    "launch.timeout": float,
    "launch.inplace": bool,
}
LEAST = {"checkpoint.every_n_steps": 1, "checkpoint.every_minutes": 0, "checkpoint.top_k": 1}
LEAST |= {"launch.max_restarts": 0, "launch.timeout": 1}
# Arguments of the Trainer that train.py gives itself.
OWN = {"callbacks": "callbacks=...", "logger": "logger=...", "plugins": "code in train.py"}
OWN |= {"use_distributed_sampler": "nothing", "default_root_dir": "hydra.run.dir=..."}
# Callbacks of Lightning that would train another way than the config says.
UNFIT = dict.fromkeys(
    ["GradientAccumulationScheduler", "BatchSizeFinder"],
    "changes the global batch. Use data.batch_size and trainer.accumulate_grad_batches.",
)
UNFIT["LearningRateFinder"] = "trains outside of the run. Use a sweep: -m optimizer.lr=0.1,0.3"


def check_knobs(cfg: DictConfig) -> None:
    """Holds the values against their types that no constructor takes, which costs no import.

    Raises:
        UserError: a value of another type, or one that train.py gives itself.
    """
    for key, hint in TOP_LEVEL.items():
        _check_value(cfg, key, OmegaConf.select(cfg, key), hint)
    if not 0 <= cfg.seed < 2**32:
        raise UserError(f"seed={cfg.seed} must lie in [0, 2**32).")
    for key, least in LEAST.items():
        value = OmegaConf.select(cfg, key)
        if value is not None and value < least:
            raise UserError(f"{key}={value} must be at least {least}.")
    for name in OWN.keys() & cfg.trainer.keys():
        raise UserError(f"trainer.{name} is given by train.py. Use {OWN[name]} instead.")
    if cfg.trainer.get("overfit_batches"):
        raise UserError("trainer.overfit_batches would take other images. Use debug=overfit.")
    strategy = str(cfg.trainer.get("strategy", "ddp"))
    if any(word in strategy for word in ("spawn", "fork", "notebook")):
        raise UserError(f"trainer.strategy={strategy} starts processes of its own. Use ddp.")
    if "ddp" not in strategy.lower() and strategy != "auto":  # DDPStrategy too, with arguments
        raise UserError(f"trainer.strategy={strategy}: each rank holds a whole replica. Use ddp.")


def check_nodes(cfg: DictConfig) -> None:
    """Holds every argument against the constructor that will take it.

    Raises:
        UserError: an argument that does not exist, the nearest one named, or one of another type.
    """
    _check_node(cfg, "", OmegaConf.to_container(cfg, resolve=True))


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A question to end a message with, empty if nothing is near."""
    matches = difflib.get_close_matches(name, [*known], n=1, cutoff=cutoff)
    return f" Did you mean {matches[0]}?" if matches else ""


def _check_node(cfg: DictConfig, key: str, node: Any) -> None:
    if not isinstance(node, Mapping):
        return
    for name, child in node.items():
        _check_node(cfg, f"{key}.{name}".lstrip("."), child)
    if "_target_" in node:
        name = str(node["_target_"]).rpartition(".")[2]
        if name in UNFIT:
            raise UserError(f"{key}: {name} {UNFIT[name]}")
        _check_arguments(cfg, key, node)


def _check_arguments(cfg: DictConfig, key: str, node: Mapping[str, Any]) -> None:
    try:
        target = get_object(node["_target_"])
    except (ImportError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{key}._target_={node['_target_']} is not there ({reason}).") from error
    try:
        parameters = inspect.signature(target).parameters
        hints = typing.get_type_hints(target.__init__ if isinstance(target, type) else target)
    except (TypeError, ValueError, NameError):  # a builtin, or a type known to type checkers only
        return
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    for name, value in node.items():
        if name.startswith("_"):
            continue
        if name not in parameters and not takes_all:
            near = nearest(name, parameters)
            raise UserError(f"{key}.{name}: {node['_target_']} takes no such argument.{near}")
        _check_value(cfg, f"{key}.{name}", value, hints.get(name, Any))


def _check_value(cfg: DictConfig, key: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        value = OmegaConf.to_container(cfg)  # as it was written: ${oc.env:...} may be a secret
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        wanted = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
        raise UserError(f"{key}={value!r} is not of type {wanted.replace('typing.', '')}.")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from YAML can be meant for an argument of type `hint`; if in doubt, yes."""
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(value, Mapping):  # a node of its own
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if isinstance(value, list) and origin in (list, tuple, Sequence, Iterable):
        return all(any(_fits(item, argument) for argument in arguments) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is None or hint is types.NoneType:
        return value is None
    if hint in (str, bool):
        return isinstance(value, hint)
    # YAML holds no tensor; any other type may be made from a string, say.
    return getattr(hint, "__name__", "") != "Tensor"
