"""Fills the new project with the files of the template. Rendered by cookiecutter."""

import json
import sys
from pathlib import Path

answers, template = json.loads(
    r"""[{{ cookiecutter | tojson }}, {{ template_folder() | tojson }}]"""
)
sys.path.insert(0, template)

from hooks.copying import fill  # noqa: E402

fill(Path.cwd(), Path(template), answers)
