"""What a user can get wrong ends in a line or three that name the key and what to do."""

import inspect
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchvision.datasets import CIFAR10
from train import main

from conftest import REPOSITORY, TINY, TRAIN, environment, outcome

from project import sources
from project.cli import explained
from project.errors import UserError
from project.rank import _mistake_behind

# What is typed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optimizer.lrr=0.1", "Could not override 'optimizer.lrr'. Did you mean optimizer.lr?"),
        ("lr=0.1", "Could not override 'lr'. Did you mean optimizer.lr?"),
        ("epochs=3", "Could not override 'epochs'. Did you mean trainer.max_epochs?"),
        ("modle=cnn", "Could not override 'modle'. Did you mean model?"),
        ("model=cnn model.witdhs=[4]", "'model.witdhs'. Did you mean model.widths?"),
        ("~model.depth", "Could not delete from config. 'model.depth' does not exist."),
        ("nonsense=1", "Could not override 'nonsense'. To append to your config use +nonsense=1"),
        ("model=spednet", "There is no model=spednet. Did you mean speednet? model: cnn, "),
        ("experiment=quikstart", "There is no experiment=quikstart. Did you mean quickstart?"),
        ("--multirn", "--multirn is no option. Did you mean --multirun?"),
        ("--devices=4", "--devices=4 is no option. Values are given as key=value (--help)."),
        ("seed=1 --cfg job test=false", "test=false: give options (--...) before or after all"),
        ("data.batch_size", "Error parsing override 'data.batch_size' missing EQUAL"),
        ("trainer.devices=[0,", "trainer.devices=[0,: no viable alternative at input"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest_that_exists(monkeypatch, words, message):
    monkeypatch.setattr(sys, "argv", [str(REPOSITORY / "train.py"), *words.split()])
    monkeypatch.setattr(inspect.unwrap(main), "__module__", "__main__")  # as when it is run
    with pytest.raises(UserError) as caught, explained(main):
        main()
    assert message in str(caught.value)
    assert str(caught.value).count("\n") <= 2
    assert "HYDRA_FULL_ERROR" not in os.environ


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=abc", "optimizer.lr='abc' is not of type float"),
        ("optimizer.lr=-1", "Invalid learning rate: -1"),
        ("+optimizer.weight_decy=1", "takes no such argument. Did you mean weight_decay?"),
        ("+model.widht=3", "model.widht: toy.Plain takes no such argument. Did you mean width?"),
        ("model.width=4.5", "model.width=4.5 is not of type int"),
        ("model.width=-1", "model: Error in call to target 'toy.Plain': RuntimeError"),
        ("model._target_=toy.Nope", "model._target_=toy.Nope is not there"),
        ("model._target_=nope.Net", "model._target_=nope.Net is not there"),
        ("trainer.precision=foo", "trainer.precision='foo' is not of type"),
        ("trainer.accumulate_grad_batches=0", "accumulate_grad_batches"),
        ("trainer.max_epochs=2.5", "trainer.max_epochs=2.5 is not of type"),
        ("trainer.limit_val_batches=x", "trainer.limit_val_batches='x' is not of type"),
        ("+trainer.nonsense=1", "trainer.nonsense: lightning.Trainer takes no such argument."),
        ("+trainer.callbacks=[]", "trainer.callbacks is given by train.py. Use callbacks=..."),
        ("+trainer.enable_checkpointing=false", "trainer:"),
        ("trainer.strategy=ddp_spawn", "starts processes of its own. Use ddp."),
        ("trainer.strategy=fsdp", "each rank holds a whole replica. Use ddp."),
        ("trainer.precision=16-mixed", "needs a GPU. On CPUs use bf16-mixed."),
        ("+trainer.sync_batchnorm=true", "needs GPUs"),
        ("+trainer.val_check_interval=1000", "`val_check_interval` (1000) must be less than"),
        ("+trainer.overfit_batches=2", "Use debug=overfit."),
        (
            "+callbacks.mine._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler",
            "callbacks.mine: GradientAccumulationScheduler changes the global batch.",
        ),
        ("+trainer.val_check_interval=00:00:00:10", "A run that validates by the clock"),
        ("data.batch_size=40.0", "data.batch_size=40.0 is not of type int"),
        ("data.batch_size=0", "data.batch_size=0"),
        (
            "data.batch_size=4000",
            "data.batch_size=4000: choose 1 to 360, the count of training images",
        ),
        ("data.val_fraction=null", "data.val_fraction=None is not of type float"),
        ("data.val_fraction=1.5", "data.val_fraction=1.5 must lie in [0, 1)"),
        ("data.num_workers=-1", "num_workers >= 0"),
        ("data.image_size=0", "image_size >= 1"),
        ("data.mean=[0.5]", "three each of mean, std"),
        ("data.augment.crop_padding=40", "data.augment.crop_padding=40"),
        ("scheduler.decay=exp", "scheduler.decay=exp: choose linear, cosine or null"),
        ("scheduler.warmup=2", "scheduler.warmup=2"),
        ("seed=abc", "seed='abc' is not of type int"),
        ("seed=-1", "seed=-1 must lie in"),
        ("seed=null", "seed=None is not of type int"),
        ("label_smoothing=2", "label_smoothing=2 must lie in [0, 1)"),
        ("launch.timeout=null", "launch.timeout=None is not of type float"),
        ("fit=false", "fit=false evaluates: give ckpt_path=FILE (of a run) or weights=FILE."),
    ],
)
def test_a_bad_value_is_refused_with_its_key(job, tmp_path, override, message):
    with pytest.raises(UserError) as caught:
        job(*TINY, "test=false", override)
    assert message in str(caught.value)
    assert str(caught.value).count("\n") <= 2
    results = outcome(tmp_path / "run")
    assert results["status"] == "failed"


# Files


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A well-formed checkpoint of a network that is not ours."""
    path = tmp_path_factory.mktemp("files") / "other.ckpt"
    state = {"net.layer.weight": torch.zeros(3)}
    config = {"model": {}, "data": {}, "trainer": {}}
    torch.save({"state_dict": state, "config": config, "epoch": 1}, path)
    return path


class Trap:
    """Runs code when unpickled by a careless reader."""

    def __reduce__(self):
        return print, ("code ran",)


def bad_files(folder: Path) -> dict[str, str]:
    """A bad file of each kind, and what is said of it."""
    torch.save({"state_dict": {"conv.weight": torch.zeros(9999)}}, folder / "whole.ckpt")
    half = (folder / "whole.ckpt").read_bytes()
    (folder / "truncated.ckpt").write_bytes(half[: len(half) // 2])
    (folder / "empty.ckpt").touch()
    (folder / "text.ckpt").write_text("no checkpoint\n")
    torch.save({"state_dict": Trap()}, folder / "trap.ckpt")
    torch.save([1, 2], folder / "list.ckpt")
    torch.save({"state_dict": [1, 2], "config": "hello"}, folder / "odd.ckpt")
    messages = dict.fromkeys(["truncated", "empty", "text"], "is damaged, or not a checkpoint")
    messages |= {"trap": "Refused, since loading it could run code", "list": "holds a list"}
    messages["odd"] = "holds no weights|is of no run of ours"
    return messages | {"missing": "there is no such file"}


@pytest.mark.parametrize(("key", "fit"), [("weights", "true"), ("ckpt_path", "false")])
def test_a_bad_file_is_named(job, tmp_path, key, fit, capfd):
    for kind, message in bad_files(tmp_path).items():
        with pytest.raises(UserError, match=message) as caught:
            job(*TINY, f"fit={fit}", f"{key}={tmp_path}/{kind}.ckpt", name=kind)
        assert f"{key}={tmp_path}/{kind}.ckpt" in str(caught.value)
    assert "code ran" not in capfd.readouterr().out


def test_a_checkpoint_of_another_network_or_project_is_refused(job, tmp_path, checkpoint):
    with pytest.raises(UserError, match=r"is of another network: conv.weight is missing there"):
        job(*TINY, f"ckpt_path={checkpoint}", name="network")
    torch.save({"state_dict": {}, "hyper_parameters": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(UserError, match=r"is of no run of ours\. Weights alone: weights="):
        job(*TINY, f"ckpt_path={tmp_path}/foreign.ckpt", name="project")
    with pytest.raises(UserError, match="holds no weights"):
        job(*TINY, f"weights={tmp_path}/foreign.ckpt", name="weights")


def test_a_checkpoint_of_another_width_is_refused(job):
    path = f"weights={job(*TINY, 'test=false', name='four')}/checkpoints/model.pt"
    with pytest.raises(UserError, match=r"conv.weight is \(4, 3, 5, 5\) there and \(6, 3, 5, 5\)"):
        job(*TINY, "model.width=6", path)


# Data


@pytest.mark.parametrize("made", [[], ["root"], ["root/train"], ["root/train/cat"]])
def test_missing_or_empty_image_folders_are_named(job, tmp_path, made):
    for folder in made:
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(UserError, match=f"data.root={tmp_path}/root lacks images"):
        job("data=imagefolder", f"data.root={tmp_path}/root", "model=cnn")


@pytest.mark.parametrize("root", ["file", "file/inside"])
def test_a_file_in_place_of_the_folder_is_named(job, tmp_path, root):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"data.root={tmp_path}/{root}: .* is not a folder"):
        job("data=imagefolder", f"data.root={tmp_path}/{root}", "model=cnn")


@pytest.mark.slow
def test_closed_streams_do_no_harm(tmp_path, working_folder):
    words = shlex.join(
        [sys.executable, TRAIN, *TINY, "test=false", f"hydra.run.dir={tmp_path}/run"]
    )
    line = f"{words} 0<&- 1>&- 2>&-"
    subprocess.run(["bash", "-c", line], cwd=working_folder, env=environment(), check=True)
    assert outcome(tmp_path / "run")["status"] == "complete"


EARLY = """
import sys
sys.stdout.write("it has ")
"""
SPEAK = """
import sys
from project.console import open_streams, say
open_streams()
say("begun")
sys.stdin.read()  # until nobody reads any more
for stream in sys.stdout, sys.stderr:
    stream.write("words")
    stream.flush()
    say("more", stream)
    print("and more", file=stream)
"""


def connection():
    """Of a network."""
    with socket.create_server(("localhost", 0)) as server:
        there = socket.create_connection(server.getsockname())
        return server.accept()[0].detach(), there.detach()


@pytest.mark.parametrize("make", [os.openpty, os.pipe, connection])
@pytest.mark.parametrize("option", ["-B", "-u"])
def test_words_that_nobody_reads_fail_nothing(make, option, monkeypatch):
    reader, writer = make()
    words = [sys.executable, option, "-c", EARLY + SPEAK]
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=writer, stderr=writer) as process:
        os.close(writer)
        said = b""
        while b"begun" not in said and (more := os.read(reader, 100)):
            said += more
        assert said.strip() == b"it has begun"
        os.close(reader)
        process.communicate()
    assert process.returncode == 0


def test_words_that_find_no_room_name_the_stream():
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-c", SPEAK]
        done = subprocess.run(words, input=b"", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode
    assert b"No space left on device: 'standard output'" in done.stderr


@pytest.mark.parametrize("where", ["stat", "scandir"])
def test_a_folder_that_may_not_be_read_is_named(job, tmp_path, monkeypatch, where):
    """Tests may run as root, whom no mode keeps out."""
    real = getattr(os, where)

    def refuse(path=".", **more):
        if str(path).startswith(f"{tmp_path}/secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **more)

    (tmp_path / "secret/train/cat").mkdir(parents=True)
    monkeypatch.setattr(os, where, refuse)
    with pytest.raises(UserError, match=f"data.root={tmp_path}/secret.*Permission denied"):
        job("data=imagefolder", f"data.root={tmp_path}/secret", "model=cnn")


def test_no_network_says_how_to_place_the_files_by_hand(tmp_path, monkeypatch):
    """Half of a download is there; it is not taken for the data."""
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"half")
    monkeypatch.setattr(CIFAR10, "url", "http://localhost:1/cifar-10-python.tar.gz")
    with pytest.raises(UserError) as caught:
        sources.cifar10(tmp_path, "train", 32)
    first, second = str(caught.value).split("\n")
    assert f"CIFAR-10 is not in {tmp_path} and cannot be downloaded" in first
    assert "cifar-10-python.tar.gz there by hand" in second
    assert "experiment=quickstart" in second


# Devices


def test_no_gpu_for_trainer_gpu(job):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="torch sees no GPU here"):
        job(*TINY, "trainer=gpu")


def test_out_of_gpu_memory_names_what_helps():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
    message = _mistake_behind(error) or ""
    assert message.startswith("CUDA out of memory. Tried to allocate 2 GiB.\n")
    for key in "trainer.precision", "trainer.accumulate_grad_batches", "data.batch_size":
        assert key in message


def test_a_fault_of_the_program_is_not_taken_for_the_users():
    assert _mistake_behind(ZeroDivisionError("x")) is None


# The whole command, on ranks


def test_a_command_ends_in_lines_without_a_traceback_and_without_a_process(command, tmp_path):
    words = [*TINY, "model.width=-1", f"hydra.run.dir={tmp_path}/run"]
    done = command("python", "train.py", *words)
    assert done.returncode == 1
    assert done.stderr.startswith("train.py: ")
    assert 1 <= done.stderr.count("\n") <= 3
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert left.stdout == ""
