"""The environment check."""

import json

import pytest

from project import env


@pytest.fixture(scope="module")
def done(command):
    return command("python", "-m", "project.env", "--json")


@pytest.mark.slow
def test_json_stands_alone_on_stdout_and_tells_of_a_real_all_reduce(done):
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert report["problems"] == []
    assert report["all_reduce"]["works"]
    assert report["all_reduce"]["bus_gb_per_s"] > 0 or report["all_reduce"]["ranks"] == 1
    assert {"python", "torch", "lightning", "cuda", "cudnn"} <= report["versions"].keys()
    assert report["cpu"]["threads_a_rank"] == 1  # OMP_NUM_THREADS of the tests
    assert report["limits"].keys() == {"disk_gib", "shared_memory_gib", "open_files"}


@pytest.mark.slow
def test_missing_data_is_a_note_and_the_quickstart_can_start(done):
    report = json.loads(done.stdout)  # run outside the project: no conf/
    assert any("no conf/train.yaml here" in note for note in report["notes"])
    assert report["command"] == "python train.py experiment=quickstart"


def test_data_in_place_are_seen(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/train.yaml").write_text("data: {root: images}\n")
    monkeypatch.chdir(tmp_path)
    notes = []
    assert env.data(notes) == {"root": "images", "there": False}
    assert notes == ["no data in images: CIFAR-10 is downloaded by the first run that needs it"]
    (tmp_path / "images/train/cat").mkdir(parents=True)
    assert env.data(notes)["there"]


@pytest.mark.parametrize(
    ("found", "problem"),
    [("1.0", "torch 1.0: needs >=2.6"), (None, "torch (missing): needs >=2.6")],
)
def test_a_version_out_of_bounds_or_missing_is_a_problem(monkeypatch, found, problem):
    real = env.metadata.version

    def version(name: str) -> str:
        if name != "torch":
            return real(name)
        if found is None:
            raise env.metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(env.metadata, "version", version)
    report = env.inspect_machine()
    assert report["problems"] == [problem]
    assert "all_reduce" not in report
    assert env.as_text(report).endswith("Not ready to train.")


def test_what_would_stop_any_training_is_exit_status_1(monkeypatch, capfd):
    monkeypatch.setattr(env, "inspect_machine", lambda: {"versions": {}, "notes": []} | BROKEN)
    monkeypatch.setattr("sys.argv", ["env", "--json"])
    assert env.main() == 1
    assert json.loads(capfd.readouterr().out)["problems"] == BROKEN["problems"]


BROKEN = {"problems": ["an all-reduce over 2 ranks failed: rank 1 ..."]}


def test_a_small_machine_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(env.resource, "getrlimit", lambda which: (256, 256))
    problems, notes = [], []
    env.limits(problems, notes)
    assert not problems
    assert any("ulimit -n" in note for note in notes)
