"""Refuses what would lose something, before a file is written. Rendered by cookiecutter."""

import json
import sys
from pathlib import Path

answers = json.loads(r"""{{ cookiecutter | tojson }}""")
for key in "project_name", "description", "author":
    if not answers[key].isprintable():
        sys.exit(f"{key}={answers[key]!r} has to be one line without control characters.")
if others := sorted(path.name for path in Path.cwd().iterdir() if path.name != ".git"):
    sys.exit(
        f"{Path.cwd()} is not empty ({others[0]}), nothing was written there. Choose another "
        "project_name; a project that cruft made is brought up to date by cruft update."
    )
