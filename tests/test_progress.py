"""What is shown while a run trains, on a terminal and elsewhere."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest

from conftest import TINY, TRAIN, environment

from project import progress


@pytest.fixture(scope="module")
def terminal(working_folder, tmp_path_factory):
    """All that a job writes to a terminal, and its train.log."""
    folder = tmp_path_factory.mktemp("terminal") / "run"
    words = [
        *TINY,
        "launch.inplace=true",
        "trainer.devices=1",
        "trainer.max_steps=360",  # seconds also on a fast machine: the bar is drawn by the clock
        "trainer.max_epochs=40",
        "trainer.log_every_n_steps=5",
    ]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, TRAIN, *words, f"hydra.run.dir={folder}"],
        cwd=working_folder,
        env=environment(COLUMNS="120"),
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    with open(ours, "rb", buffering=0) as screen:  # noqa: PTH123
        seen = b""
        try:
            while part := screen.read(65536):
                seen += part
        except OSError:  # how Linux ends a terminal
            pass
    assert process.wait() == 0, seen.decode()
    return seen.decode(), (folder / "train.log").read_text()


STATUS = r"epoch \d+/\d+  step \d+/360  loss \d+\.\d{4}  lr \S+  [\d,]+ images/s  [\d:]+ left"


@pytest.mark.slow
def test_a_terminal_gets_a_bar_in_place_of_the_lines_of_steps(terminal):
    seen, log = terminal
    bars = re.findall(rf"\r{STATUS} \|[^|\n]*\|", seen)
    assert bars
    assert not re.search(rf"{STATUS}\r?\n", seen)
    assert len(re.findall(STATUS, log)) == 360 // 5


@pytest.mark.slow
def test_the_bar_is_refreshed_a_few_times_a_second_at_most(terminal):
    seen, _ = terminal
    seconds = float(re.search(r"complete in ([\d.]+) s", seen)[1])  # type: ignore[index]
    epochs = len(re.findall(r"epoch \d+  step", seen))  # each line of an epoch draws it once more
    assert seen.count(" left |") <= seconds / progress.SECONDS_BETWEEN + epochs + 2


@pytest.mark.slow
def test_the_lines_of_epochs_stand_clear_of_the_bar(terminal):
    seen, _ = terminal
    lines = re.findall(r"\r?([^\r\n]*train/acc [^\r\n]*)\r\n", seen)
    assert len(lines) == 40
    assert all(line.startswith("epoch ") and "|" not in line for line in lines)
    assert seen.rstrip().split("\r\n")[-1].startswith("  evaluate with: python train.py")


def test_elsewhere_there_are_lines_and_no_control_codes(job, capfd):
    job(*TINY, "trainer.log_every_n_steps=4", "test=false")
    shown = capfd.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", shown)
    assert len(re.findall(r"^epoch \d/2  step \d+/12  loss ", shown, re.MULTILINE)) == 3
    assert len(re.findall(r"^epoch \d  step \d+  train/loss ", shown, re.MULTILINE)) == 2


@pytest.mark.filterwarnings("default:this matters")
def test_a_warning_that_matters_appears_once(job, capfd):
    job(*TINY, "test=false", "+callbacks.chatty._target_=faults.Warns")
    shown = capfd.readouterr()
    assert (shown.out + shown.err).count("UserWarning: this matters") == 1


def test_upstreams_tips_do_not_appear(job, capfd):
    job(*TINY, "test=false")
    shown = capfd.readouterr()
    assert not re.search(
        r"[Tt]ip|litlogger|GPU available|TPU|distributed_backend|Warning", shown.out
    )
    assert shown.err == ""


def test_the_bar_goes_away_with_an_exception(monkeypatch):
    screen = io.StringIO()
    bar = progress.Progress()
    bar._bar = progress.tqdm(total=3, file=screen)
    bar.on_exception(None, None, ValueError())
    assert bar._bar is None
