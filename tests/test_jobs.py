"""Everyday use, each job in this process on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import REPOSITORY, TINY, history, outcome

from project import checkpoint, plots
from project.errors import UserError

SHORT = [*TINY, "trainer.max_steps=4", "test=false"]

CONF = REPOSITORY / "conf"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints/model.pt", weights_only=True)


# Optimisation


@pytest.mark.parametrize(
    "override",
    [
        "trainer.precision=bf16-mixed",
        "trainer.precision=64-true",
        "label_smoothing=0.3",
        "trainer.gradient_clip_val=0.01",
        "optimizer.weight_decay=0.1",
    ],
)
def test_what_changes_the_optimisation_changes_the_weights(job, override):
    plain, changed = weights(job(*SHORT, name="plain")), job(*SHORT, override)
    assert outcome(changed)["steps"] == 4
    assert all(value.isfinite().all() for value in weights(changed).values())
    assert all(not torch.equal(weights(changed)[name], plain[name]) for name in plain)


def test_accumulation_takes_the_same_steps_in_smaller_parts(job):
    plain, parts = job(*SHORT, name="plain"), job(*SHORT, "trainer.accumulate_grad_batches=4")
    for name, value in weights(plain).items():
        torch.testing.assert_close(value, weights(parts)[name], atol=1e-5, rtol=1e-4)


def test_64_true_trains_in_double(job):
    folder = job(*SHORT, "trainer.precision=64-true")
    assert {value.dtype for value in weights(folder).values()} == {torch.float64}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_run_has_the_checkpoints_of_a_plain_one(job):
    plain, compiled = job(*SHORT, name="plain"), job(*SHORT, "compile=true", "test=true")
    assert weights(plain).keys() == weights(compiled).keys()
    assert outcome(compiled)["test/count"] == 101
    for name, value in weights(plain).items():
        torch.testing.assert_close(value, weights(compiled)[name], atol=1e-4, rtol=1e-3)


# What comes along in conf/; a project may do without.
CHOICES = ["data=shapes", "model=cnn", "model=cnn_small", "model=resnet18", "model=speednet"]
CHOICES += ["optimizer=adam", "optimizer=adamw", "optimizer=sgd"]
CHOICES += ["scheduler=constant", "scheduler=cosine", "scheduler=linear"]


def is_there(choice: str) -> bool:
    return (CONF / choice.replace("=", "/")).with_suffix(".yaml").exists()


def test_early_stopping_is_five_lines(job):
    yaml = CONF / "callbacks/early_stopping.yaml"
    assert len(yaml.read_text().splitlines()) == 5
    more = ["callbacks.early_stopping.patience=1", "optimizer.lr=1e-9", "trainer.max_epochs=9"]
    folder = job(*TINY, "test=false", "callbacks=early_stopping", "trainer.max_steps=-1", *more)
    assert outcome(folder)["epochs"] == 2  # val/acc does not rise


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if is_there(choice)])
def test_every_choice_of_a_group_trains(job, choice):
    tiny = ["experiment=quickstart", "data.source.num_train=40", "data.batch_size=8"]
    folder = job(*tiny, "trainer.max_steps=1", "test=false", "data.val_fraction=0", choice)
    assert outcome(folder)["steps"] == 1


def test_any_callable_of_num_classes_is_a_network(job):
    target = ["model._target_=torchvision.models.squeezenet1_1", "~model.widths"]
    small = ["data.source.num_train=40", "data.batch_size=8", "data.val_fraction=0"]
    folder = job("experiment=quickstart", *target, *small, "trainer.max_steps=1", "test=false")
    assert weights(folder)["classifier.1.weight"].shape[0] == 10


# Loggers


def test_loggers_get_steps_and_epochs_and_several_work_at_once(job):
    folder = job(*TINY, "logger=[tensorboard,csv]", "trainer.log_every_n_steps=2")
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    tags = {"step/loss", "step/lr", "step/images_per_second", "train/loss", "train/acc"}
    assert tags | {"val/loss", "val/acc", "test/acc"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("step/loss")] == [2, 4, 6, 8, 10, 12]
    logged = [event.value for event in events.Scalars("val/acc")]
    assert logged == pytest.approx([float(row["val/acc"] or "nan") for row in history(folder)][:1])
    assert "step/loss" in (folder / "csv/version_0/metrics.csv").read_text()


def test_no_logger_leaves_the_rows_of_epochs(job):
    folder = job(*SHORT, "logger=none")
    assert len(history(folder)) == 1
    assert not (folder / "tensorboard").exists()


# Evaluation and fine-tuning


@pytest.fixture(scope="module")
def trained(run_here, tmp_path_factory):
    return run_here(tmp_path_factory.mktemp("trained") / "run", *TINY, "model.width=6")


def test_an_evaluation_gives_the_numbers_of_the_run_without_its_config(job, trained):
    path = f"ckpt_path={trained}/checkpoints/best.ckpt"
    again, expected = (
        outcome(job("fit=false", path, "trainer=cpu", "trusted=[toy]")),
        outcome(trained),
    )
    names = [f"{stage}/{name}" for stage in ("val", "test") for name in ("loss", "acc")]
    assert {name: again[name] for name in names} == {name: expected[name] for name in names}
    assert again["test/count"] == expected["test/count"] == 101


def test_a_run_without_validation_is_evaluated_on_its_test_images(job):
    plain = job(*TINY, "data.val_fraction=0", name="plain")
    assert outcome(plain)["checkpoint"] == "checkpoints/last.ckpt"
    path = f"ckpt_path={plain}/checkpoints/last.ckpt"
    again = outcome(job("fit=false", path, "trusted=[toy]"))
    assert again["test/acc"] == outcome(plain)["test/acc"]
    assert not [name for name in again if name.startswith("val/")]


def test_what_the_command_line_says_wins_over_the_stored_config(job, trained):
    path = f"ckpt_path={trained}/checkpoints/best.ckpt"
    given = ["fit=false", path, "trusted=[toy]", "+data.source.num_test=50"]
    assert outcome(job(*given))["test/count"] == 50
    with pytest.raises(UserError, match=r"is of another network: .*\n.*model="):
        job(*given, "model=cnn_small", name="other")


def test_a_stored_config_builds_nothing_that_is_not_trusted(job, trained):
    with pytest.raises(UserError, match=r"wants to build toy.Plain.*\n.*trusted=\[toy\]"):
        job("fit=false", f"ckpt_path={trained}/checkpoints/best.ckpt")


def test_a_metric_of_ones_own_is_recorded_and_can_be_monitored(job):
    own = [
        "+callbacks.own._target_=toy.Countdown",
        "callbacks=early_stopping",
        "trainer.max_epochs=4",
    ]
    stop = [
        f"callbacks.early_stopping.{value}" for value in ("monitor=val/countdown", "patience=1")
    ]
    folder = job(*(word for word in TINY if "max_" not in word), *own, *stop)
    assert [row["val/countdown"] for row in history(folder)] == ["-9.0", "-18.0"]  # then it stopped
    assert outcome(folder)["val/countdown"] in (-9.0, -18.0)  # that of the best val/acc


RUN = "${oc.create:{_target_:os.system,command:'touch ran'}}"  # a resolver that builds anything


def foreign(target: str, **arguments: Any) -> dict[str, Any]:
    """A node that builds something of this package."""
    return {"_target_": f"{checkpoint.__package__}.{target}", **arguments}


@pytest.mark.parametrize(
    ("group", "value", "message"),
    [
        ("model", {"_target_": "os.system", "command": "touch ran"}, "wants to build os.system"),
        ("model", foreign("sources.Image.open"), "wants to build .+sources.Image.open"),
        ("model", foreign("files.write_json"), "wants to build .+files.write_json"),
        ("model", foreign("model.Gone"), "Gone, which is not there"),
        ("model", foreign("model.CNN", widths=RUN), "holds model.widths"),
        ("model", foreign("model.CNN", widths=[{"_target_": "os.abort"}]), "abort"),
        ("data", {"root": "${oc.env:HOME}"}, "holds data.root"),
        ("trainer", {"precision": RUN}, "holds trainer.precision"),
    ],
)
def test_no_code_of_a_stored_config_runs(job, trained, tmp_path, group, value, message):
    content = torch.load(trained / "checkpoints/best.ckpt", weights_only=True)
    content["config"][group] = value
    torch.save(content, tmp_path / "bad.ckpt")
    with pytest.raises(UserError, match=message):
        job("fit=false", f"ckpt_path={tmp_path}/bad.ckpt", "trusted=[toy]")
    assert not Path("ran").exists()


def test_to_go_on_where_nothing_is_left_is_refused(job, trained):
    with pytest.raises(UserError, match=r"trained 12 steps already, of 12: raise trainer\.max_"):
        job(*TINY, "model.width=6", f"ckpt_path={trained}/checkpoints/last.ckpt")


@pytest.mark.parametrize("prefix", ["net.", "module.", "_orig_mod.module.", "module._orig_mod."])
@pytest.mark.parametrize("names", [{"conv.weight", "net.bias"}, {"net.0.weight", "net.0.bias"}])
def test_weights_of_wrapped_networks_are_understood(prefix, names):
    """Also those of a network whose own names all begin like a wrapper's."""
    for state in (
        {f"{prefix}{name}": torch.zeros(1) for name in names},
        dict.fromkeys(names, torch.zeros(1)),
    ):
        assert checkpoint.weights_in(state, names, "x.pt", "weights").keys() == names
        lightnings = {"state_dict": state, "epoch": 1}
        assert checkpoint.weights_in(lightnings, names, "x.pt", "weights").keys() == names


def test_weights_alone_can_be_evaluated(job, trained):
    path = f"weights={trained}/checkpoints/model.pt"
    evaluated = outcome(job(*TINY, "model.width=6", "fit=false", path))
    assert evaluated["test/acc"] == outcome(trained)["test/acc"]
    assert evaluated["checkpoint"] == path.removeprefix("weights=")


@pytest.mark.parametrize("file", ["model.pt", "best.ckpt"])
def test_fine_tuning_starts_from_the_weights(job, trained, file):
    path = f"weights={trained}/checkpoints/{file}"
    folder = job(*SHORT, "model.width=6", path, "optimizer.lr=1e-12", "trainer.max_steps=1")
    expected = weights(trained)
    for name, value in weights(folder).items():
        torch.testing.assert_close(value, expected[name])


def test_a_head_for_other_classes_starts_anew_and_is_named(job, trained, tmp_path):
    state = weights(trained)
    state["head.weight"], state["head.bias"] = state["head.weight"][:7], state["head.bias"][:7]
    torch.save(state, tmp_path / "seven.pt")
    more = ["model.width=6", "optimizer.lr=1e-12", f"weights={tmp_path}/seven.pt"]
    folder = job(*SHORT, *more)
    torch.testing.assert_close(weights(folder)["conv.weight"], state["conv.weight"])
    assert "starts anew: head.bias, head.weight" in (folder / "train.log").read_text()


# Pictures


def test_many_classes_make_no_larger_picture():
    figure = plots.confusion(torch.eye(900), [f"class {i}" for i in range(900)])
    assert figure.get_size_inches().max() <= 15


def test_pictures_are_drawn(job):
    folder = job(*TINY)
    for name in "curves", "confusion", "mistakes":
        with Image.open(folder / f"plots/{name}.png") as image:
            colours = image.convert("RGB").getcolors(1 << 24)
        assert len(colours or []) > 50, name


# Modes


def test_debug_fast_takes_seconds_and_every_part(job):
    folder = job("experiment=quickstart", "debug=fast")
    results = outcome(folder)
    assert (results["steps"], results["epochs"]) == (1, 1)
    assert {"val/acc", "test/acc"} <= results.keys()


@pytest.mark.slow
def test_debug_overfit_learns_by_heart(job):
    folder = job("experiment=quickstart", "debug=overfit")
    assert float(history(folder)[-1]["train/acc"]) == 1


def test_debug_profile_says_where_the_time_goes(job):
    small = ["data.source.num_train=400", "data.batch_size=40"]
    folder = job("experiment=quickstart", "debug=profile", *small)
    assert "optimizer_step" in (folder / "fit-profile.txt").read_text()


# A loss that is no number


@pytest.mark.parametrize("every", [1, 100])
def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(job, tmp_path, every):
    """Step 11 lies inside the second epoch, which ends with step 12."""
    fault = ["+callbacks.fault._target_=faults.BadLoss", "+callbacks.fault.step=11"]
    with pytest.raises(UserError, match=r"the loss of step 11 \(epoch 2\) is not a finite number"):
        job(*TINY, *fault, f"trainer.log_every_n_steps={every}")
    folder = tmp_path / "run"
    last = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 9
    assert all(value.isfinite().all() for value in last["state_dict"].values())
    assert outcome(folder)["status"] == "failed"


def test_weights_that_are_no_numbers_are_not_saved(job, tmp_path):
    """The loss of the last step is fine, its update is not."""
    with pytest.raises(UserError, match=r"a weight after step 9 \(epoch 1\) is not a finite"):
        job(*TINY, "+callbacks.fault._target_=faults.BadWeight", "+callbacks.fault.step=9")
    assert not (tmp_path / "run/checkpoints").exists()
