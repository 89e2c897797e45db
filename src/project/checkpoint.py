"""Checkpoints as they come from elsewhere: no code is run, and every misfit told in a line."""

import logging
import pickle
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from project.errors import UserError

LAST = "checkpoints/last.ckpt"
PREVIOUS = "checkpoints/previous.ckpt"

log = logging.getLogger(__package__)


def read(path: str, key: str) -> dict[str, Any]:
    """Reads a checkpoint or a plain state dict, to the CPU.

    Args:
        key: of the config that names the file, for messages.

    Raises:
        UserError: there is no such file, it is damaged, or it would run code.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{key}={path}: there is no such file.") from None
    except pickle.UnpicklingError as error:
        if "global" not in str(error).lower():
            raise UserError(f"{key}={path} is damaged, or not a checkpoint.") from error
        raise UserError(
            f"{key}={path} holds more than tensors, numbers and text. Refused, since "
            f"loading it could run code."
        ) from error
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"{key}={path}: {error.strerror}.") from error
    except Exception as error:  # what torch raises for damaged bytes is of many types
        raise UserError(f"{key}={path} is damaged, or not a checkpoint.") from error
    if not isinstance(content, dict):
        raise UserError(f"{key}={path} holds a {type(content).__name__}, not a checkpoint.")
    return content


def begun(folder: Path) -> str | None:
    """The checkpoint from which a run goes on, the same on all ranks; None if it has none yet.

    That is the last, or if it is damaged the one before it, which is said.

    Raises:
        UserError: both are damaged.
    """
    last, previous = folder / LAST, folder / PREVIOUS
    if not last.exists() and not previous.exists():
        return None
    wrong = _damage(last)
    if not wrong:
        return str(last)
    log.warning("%s is damaged (%s)", last, wrong)
    if _damage(previous):
        raise UserError(f"{folder} has no undamaged checkpoint to go on from.")
    log.warning("the one before it is taken, %s", previous.name)
    return str(previous)


def _damage(path: Path) -> str | None:
    """What is wrong with the bytes of a checkpoint; torch.load looks at no checksum."""
    try:
        with zipfile.ZipFile(path) as file:
            part = file.testzip()
        return part and f"checksum of {part}"
    except (zipfile.BadZipFile, OSError) as error:
        return str(error)


def read_run(path: str, key: str = "ckpt_path") -> dict[str, Any]:
    """Reads the checkpoint of a run.

    Raises:
        UserError: see `read`; or it is somebody else's.
    """
    content = read(path, key)
    config = content.get("config")
    if not isinstance(config, dict) or {"model", "data", "trainer"} - config.keys():
        raise UserError(f"{key}={path} is of no run of ours. Weights alone: weights={path}.")
    return content


def weights_in(
    content: dict[str, Any], names: Collection[str], path: str, key: str
) -> dict[str, Tensor]:
    """The plain state dict of the network in a checkpoint of ours, of DDP's, or in a plain one.

    Args:
        names: in the network's own state dict; wrappers' prefixes are taken off until some fit.

    Raises:
        UserError: there is none.
    """
    state = content.get("state_dict", content)
    if not isinstance(state, dict) or not state or not all(map(_is_weight, state.items())):
        raise UserError(f"{key}={path} holds no weights (a state dict, or a checkpoint with one).")
    prefixes = "net.", "module.", "_orig_mod."  # of ours, of DDP's and of torch.compile's wrapper
    while not state.keys() & {*names}:
        prefix = next((p for p in prefixes if all(name.startswith(p) for name in state)), None)
        if prefix is None:
            break  # of another network
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _is_weight(item: tuple[Any, Any]) -> bool:
    name, value = item
    return isinstance(name, str) and isinstance(value, Tensor)


def load_weights(net: nn.Module, path: str, num_classes: int) -> None:
    """Starts `net` from the weights in a file; a head for other classes starts anew, and is named.

    Raises:
        UserError: the weights are of another network.
    """
    own = net.state_dict()
    weights = weights_in(read(path, "weights"), own, path, "weights")
    shared = sorted(own.keys() & weights.keys())
    heads = [name for name in shared if _is_head(own[name], weights[name], num_classes)]
    weights |= {name: own[name] for name in heads}
    check_fit(net, weights, f"weights={path}")
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:  # sparse tensors, or such without data
        raise UserError(f"weights={path}: {' '.join(str(error).split())}") from error
    if heads:
        log.info("weights=%s is for other classes; starts anew: %s", path, ", ".join(heads))


def check_run(net: nn.Module, path: str, key: str = "ckpt_path") -> None:
    """Raises UserError unless the checkpoint of a run is of this network."""
    weights = weights_in(read_run(path, key), net.state_dict(), path, key)
    check_fit(net, weights, f"{key}={path}")


def check_fit(net: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Raises UserError unless `weights` have just the names and shapes of `net`."""
    here, there = ({k: tuple(v.shape) for k, v in s.items()} for s in (net.state_dict(), weights))
    misfits = [name for name in here | there if here.get(name) != there.get(name)]
    if misfits:
        name = misfits[0]
        raise UserError(
            f"{source} is of another network: {name} is {there.get(name, 'missing')} there and "
            f"{here.get(name, 'missing')} here ({len(misfits)} such).\n"
            f"Choose the model=... that wrote it."
        )


def _is_head(own: Tensor, other: Tensor, num_classes: int) -> bool:
    """Whether a tensor differs in its first dimension only, which here is that of the classes."""
    same_inside = own.ndim == other.ndim > 0 and own.shape[1:] == other.shape[1:]
    return same_inside and len(own) == num_classes != len(other)
