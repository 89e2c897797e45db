"""What cookiecutter.json and the hooks ask of the template, as an extension of Jinja."""

import importlib
import os
import sys
from typing import Any

from hooks.names import objection
from jinja2 import Environment, pass_context
from jinja2.ext import Extension
from jinja2.runtime import Context

WORDS = "project_name", "package_name", "description", "author"


class Template(Extension):
    """Adds a filter `checked` for the folder of a project, and `template_folder()` for hooks."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["checked"] = checked
        # cookiecutter (hooks.run_hook_from_repo_dir), and so cruft, enters the repository to
        # render a hook. Its `_repo_dir` would not do: it may be relative to a folder that was
        # left, and cruft has none. (With a hook pre_prompt it is absolute, at the price of a copy
        # of the whole folder, data and runs included.)
        environment.globals["template_folder"] = os.getcwd
        # cruft renders two versions of a template in one process: each is to find its own code.
        # (Not cookiecutter, whose relative path to it leads nowhere from another folder.)
        if "cruft" in sys.modules:
            for name in [name for name in sys.modules if name.partition(".")[0] == "hooks"]:
                del sys.modules[name]
            importlib.invalidate_caches()


@pass_context
def checked(context: Context, folder: str) -> str:
    """The folder, if the answers so far can become a project.

    Raises:
        SystemExit: they cannot; its words end cookiecutter, and cruft, without a traceback.
    """
    answers: Any = context["cookiecutter"]
    words = {key: text for key, text in answers.items() if key in WORDS}
    if reason := objection(folder, words):
        sys.exit(f"Error: {reason}")
    return folder
