"""Files that are there whole or not at all."""

import csv
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from project.errors import UserError


def write_atomically(
    path: Path, write: Callable[[IO[bytes]], Any], keep: Path | None = None
) -> None:
    """Calls `write` on a temporary file beside `path`, flushes it to disk and renames it.

    Args:
        keep: where the earlier file goes, once the new one is safely there.

    Raises:
        UserError: the disk is full, the folder read-only, and so on; `path` is as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{path.name}-"
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=prefix, delete=False) as part:
            try:
                write(part)
                part.flush()
                os.fsync(part.fileno())
                os.fchmod(part.fileno(), 0o644)  # temporary files are born private
                if keep and path.exists():
                    link_atomically(path, keep)
                Path(part.name).replace(path)
            except BaseException:
                Path(part.name).unlink(missing_ok=True)
                raise
    except (OSError, RuntimeError) as error:
        # torch.save raises a RuntimeError about its position when a write fails
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise UserError(f"{path} cannot be written: {reason.strerror or reason}.") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    write_atomically(path, lambda file: file.write(content))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a dictionary as indented JSON, atomically; NaN, which JSON lacks, as null."""
    content = {k: None if isinstance(v, float) and v != v else v for k, v in content.items()}
    write_bytes(path, f"{json.dumps(content, indent=2)}\n".encode())


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows as CSV, atomically; a value that a row lacks is empty."""
    text = io.StringIO(newline="")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def link_atomically(source: Path, target: Path) -> None:
    """Makes `target` the same file as `source`, atomically; files are replaced, never changed."""
    if target.exists() and target.samefile(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}-link")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, part)
    part.replace(target)
