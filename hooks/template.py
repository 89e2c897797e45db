"""What cookiecutter.json and the hooks ask of the template, as an extension of Jinja."""

import os
from typing import Any

from click import ClickException
from hooks.names import objection
from jinja2 import Environment, pass_context
from jinja2.ext import Extension
from jinja2.runtime import Context


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


@pass_context
def checked(context: Context, folder: str) -> str:
    """The folder, if the answers so far can become a project.

    Raises:
        ClickException: they cannot; cookiecutter ends with its words alone.
    """
    answers: Any = context["cookiecutter"]
    if reason := objection(folder, answers["project_name"], answers["package_name"]):
        raise ClickException(reason)
    return folder
