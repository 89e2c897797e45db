"""Whether this machine can train: python -m project.env [--json]

Prints versions, devices, limits, and the result of a real all-reduce over all devices, then a
verdict and the command to start with. Exit status 1 if something would stop any training.
"""

import argparse
import json
import os
import resource
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

# torch and what needs it are imported late: that they are missing is what this may have to say.

GIB = 2**30


def main() -> int:
    """Prints the report; returns the exit status."""
    parser = argparse.ArgumentParser(f"python -m {__package__}.env", description=str(__doc__))
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    as_json = parser.parse_args().json
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print goes to stderr
    report = inspect_machine()
    stdout.write(json.dumps(report, indent=2) if as_json else as_text(report))
    stdout.write("\n")
    stdout.close()
    return 1 if report["problems"] else 0


def inspect_machine() -> dict[str, Any]:
    """Looks at everything.

    Returns:
        versions, gpus, cpu, limits, data, all_reduce; `problems` that would stop any training,
        `notes` that would not; `command` to start with.
    """
    report: dict[str, Any] = {"problems": [], "notes": []}
    report["versions"] = versions(report["problems"])
    report["limits"] = limits(report["problems"], report["notes"])
    if not report["problems"]:
        from project import allreduce

        report |= devices(report["notes"])
        report["data"] = data(report["notes"])
        report["all_reduce"] = allreduce.measure(len(report["gpus"]), report["problems"])
    start = "experiment=quickstart"
    if report.get("gpus") and report["data"]["there"]:
        start = "trainer.devices=-1"
    report["command"] = f"python train.py {start}"
    return report


def versions(problems: list[str]) -> dict[str, dict[str, Any]]:
    """Version and bound of Python, of each dependency, and of what torch was built with."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    name = str(__package__).replace("_", "-")
    try:
        own = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        problems.append(f"{name} is not installed: pip install -e .")
        return {}
    python = ".".join(map(str, sys.version_info[:3]))
    found = {"python": (python, SpecifierSet(own["Requires-Python"] or ""))}
    for line in own.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            try:
                version = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                version = ""
            found[requirement.name] = (version, requirement.specifier)
    for package, (version, bound) in found.items():
        if not bound.contains(version or "0", prereleases=True):
            problems.append(f"{package} {version or '(missing)'}: needs {bound}")
    result = {p: {"version": v, "needs": str(bound)} for p, (v, bound) in found.items()}
    return result | ({} if problems else _built_with())


def _built_with() -> dict[str, dict[str, Any]]:
    import torch

    parts: dict[str, Any] = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if torch.version.cuda:
        from torch.cuda import nccl

        parts["nccl"] = ".".join(map(str, nccl.version()))
    return {name: {"version": str(v or "none"), "needs": ""} for name, v in parts.items()}


def limits(problems: list[str], notes: list[str]) -> dict[str, Any]:
    """Free disk here and shared memory in GiB, open files."""
    shared = Path("/dev/shm")
    found = {
        "disk_gib": round(shutil.disk_usage(".").free / GIB, 2),
        "shared_memory_gib": round(shutil.disk_usage(shared).free / GIB, 2)
        if shared.exists()
        else 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
    if found["disk_gib"] < 0.25:
        problems.append(f"only {found['disk_gib']} GiB of disk are free here")
    if found["shared_memory_gib"] < 1:
        notes.append("little shared memory in /dev/shm: keep data.num_workers=0")
    if found["open_files"] < 1024:
        notes.append(f"{found['open_files']} open files allowed: ulimit -n 4096 for many workers")
    return found


def devices(notes: list[str]) -> dict[str, Any]:
    """GPUs with their memory, cores, and the threads that a rank would get."""
    import torch

    from project.devices import num_cores, threads_a_rank

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if not gpus:
        built = f"torch is built for CUDA {torch.version.cuda or '(none)'}"
        why = f" (nvidia-smi is here, {built})" if shutil.which("nvidia-smi") else ""
        notes.append(f"torch sees no GPU{why}: ranks are CPU processes")
    cores, ranks = num_cores(), len(gpus) or 1
    return {
        "gpus": [
            {"name": gpu.name, "memory_gib": round(gpu.total_memory / GIB, 1)} for gpu in gpus
        ],
        "cpu": {"cores": cores, "ranks": ranks, "threads_a_rank": threads_a_rank(ranks)},
    }


def data(notes: list[str]) -> dict[str, Any]:
    """Whether the data of the config in this folder are in place."""
    from hydra import compose, initialize_config_dir

    if not Path("conf/train.yaml").exists():
        notes.append("no conf/train.yaml here: start from the folder of train.py")
        return {"root": None, "there": False}
    with initialize_config_dir(str(Path("conf").resolve()), version_base="1.3"):
        root = Path(compose("train").data.root)
    signs = ".packed/*-train", "train/*", "cifar-10-batches-py/data_batch_5"
    there = any(True for sign in signs for _ in root.glob(sign))
    if not there:
        notes.append(f"no data in {root}: CIFAR-10 is downloaded by the first run that needs it")
    return {"root": str(root), "there": there}


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["versions"]
    for name, part in report["versions"].items():
        lines.append(f"  {name:14}{part['version']:14}{part['needs']}".rstrip())
    for title in "gpus", "cpu", "limits", "data", "all_reduce":
        value = report.get(title)
        for part in (value or [{"none": ""}]) if isinstance(value, list) else [value or {}]:
            words = "  ".join(f"{key} {entry}" for key, entry in part.items())
            lines.append(f"{title:14}  {words}")
    lines += [f"{kind[:-1]:14}  {line}" for kind in ("notes", "problems") for line in report[kind]]
    if report["problems"]:
        return "\n".join([*lines, "", "Not ready to train."])
    return "\n".join([*lines, "", f"Ready to train: {report['command']}"])


if __name__ == "__main__":
    sys.exit(main())
