"""The command line: mistakes in one line with the nearest word that exists, and the last words."""

import contextlib
import difflib
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from project.errors import UserError
from project.folder import shown
from project.schema import nearest

MISTAKES = HydraException, OmegaConfBaseException, yaml.YAMLError  # in words, or in config files


@contextlib.contextmanager
def explained(main: Callable[..., Any]) -> Iterator[None]:
    """Turns what Hydra says of a command line or a config file into a UserError.

    Args:
        main: decorated by `hydra.main`, in a file beside `conf/`.
    """
    _refuse_unknown_options(sys.argv[1:])
    asked = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints and exits by itself
    try:
        yield
    except MISTAKES as error:
        if asked and not isinstance(error, MissingConfigException):
            raise
        raise UserError(reason(error, main)) from error
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        os.environ |= {"HYDRA_FULL_ERROR": asked} if asked else {}


def reason(error: Exception, main: Callable[..., Any] | None = None) -> str:
    """What one of MISTAKES says, in a line or two.

    Args:
        main: whose command line may hold a key that is nearly one of its config's.
    """
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = [*(error.options or [])]
        there = f" {group}: {', '.join(options)}." if options else ""
        return f"There is no {group}={name}.{nearest(name, options)}{there}"
    first, *more = str(error).strip().split("\n")
    if isinstance(error, yaml.YAMLError):
        first, more = " ".join(str(error).split()), []
    if isinstance(error, OverrideParseException) and error.override not in first:
        first = f"{error.override}: {first}"
    if "requires --multirun" in first:  # hydra.mode=MULTIRUN is passed over where a value is wrong
        first += ". If hparams_search asks for it, a word about the sweep is wrong: -m says which"
    first = first.replace(", set env var HYDRA_FULL_ERROR=1 to see chained exception", "")
    wrong = re.search(r"Could not (?:override|delete) '([^'=]+)", first)
    near = _nearest_key(main, wrong[1]) if main and wrong else ""
    return f"{first}{near or ' '.join(['', *more[:1]])}"


def asks_to_run(words: list[str]) -> bool:
    """Whether a command line is more than a question to Hydra (--help, --cfg, --info, ...)."""
    known = get_args_parser().parse_known_args(words)[0]
    return not (known.help or known.hydra_help or known.cfg or known.info or known.shell_completion)


def _refuse_unknown_options(words: list[str]) -> None:
    parser = get_args_parser()
    unknown = parser.parse_known_args(words)[1]
    options = [word for word in unknown if word.startswith("-")]
    if options:
        near = nearest(options[0], parser._option_string_actions)
        raise UserError(f"{options[0]} is no option.{near} Values are given as key=value (--help).")
    if unknown:  # argparse takes one row of them
        raise UserError(f"{unknown[0]}: give options (--...) before or after all values.")


def _nearest_key(main: Callable[..., Any], wrong: str) -> str:
    """`nearest` among the groups and keys that the rest of the command line composes."""
    folder = Path(inspect.unwrap(main).__code__.co_filename).parent / "conf"
    rest = [
        word
        for word in sys.argv[1:]
        if re.match(r"[+~]*[\w/.@]+=", word) and wrong not in word and "resume=" not in word
    ]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder.resolve()), version_base="1.3"):
            rest = [word for word in rest if not word.startswith("hydra.")]
            overrides = OverridesParser.create().parse_overrides(rest)
            single = [o.input_line for o in overrides if o.input_line and not o.is_sweep_override()]
            cfg = compose("train", single, return_hydra_config=True)
    except HydraException:  # a second mistake
        return ""
    keys = [*_keys(OmegaConf.to_container(cfg)), *(p.name for p in folder.iterdir() if p.is_dir())]
    if wrong in keys:  # something is wrong with its value
        return ""
    keys = [key for key in keys if key.startswith("hydra") == wrong.startswith("hydra")]
    # lr=0.1 means optimizer.lr, and epochs=3 trainer.max_epochs: the last word decides.
    ends = difflib.get_close_matches(wrong.split(".")[-1], {key.split(".")[-1] for key in keys})
    return nearest(wrong, [key for key in keys if key.split(".")[-1] in ends[:1]], cutoff=0)


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    for name, child in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{name}"
        yield from _keys(child, f"{prefix}{name}.")


def as_word(key: str, value: str) -> str:
    """`key=value` for Hydra, the value quoted where it must be."""
    if not re.fullmatch(r"[\w./:-]+", value, re.ASCII):
        value = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return f"{key}={value}"


def quoted(key: str, value: str) -> str:
    """The same for a shell."""
    return shlex.quote(as_word(key, value))


def closing_table(results: Mapping[str, Any], folder: Path, cfg: DictConfig) -> str:
    """What a completed run says last: its metrics, its folder, and how to evaluate it again."""
    lines = [f"complete in {results['seconds']:.1f} s"]
    for stage in "val", "test":
        names = [name for name in results if name.startswith(f"{stage}/") and name != "test/count"]
        names.sort(key=lambda name: (not name.endswith("/loss"), not name.endswith("/acc"), name))
        if names:
            lines.append("  " + "  ".join(f"{name} {results[name]:.4f}" for name in names))
    if "test/count" in results:
        lines[-1] += f"  test/count {results['test/count']}"
    lines.append(f"  run folder {shown(folder)}")
    if "epochs" in results:
        from project.stored import untrusted

        path = shown(folder / results["checkpoint"])
        command = f"python train.py fit=false {quoted('ckpt_path', path)}"
        packages = untrusted(cfg)
        trust = f" 'trusted=[{','.join(packages)}]'" if packages else ""
        lines.append(f"  evaluate with: {command}{trust}")
    return "\n".join(lines)
