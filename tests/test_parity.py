"""The Trainer's run is the raw DDP loop's, bit for bit, in every regime."""

import csv
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torchvision.transforms.functional as TF
from torch.utils.data import DistributedSampler
from torchvision.datasets import ImageFolder

import laws
from conftest import REPOSITORY, chosen, history, needs_docs, unless
from reference_ddp import augmented, digest
from regimes import BATCH, EPOCHS, REGIMES, STEPS, words_of
from step_trace import read_trace, step_losses
from test_augment import FULL, MEAN, STD, batched

from project.augment import Augment
from project.data import stratified_split

WORLDS = {"1 rank": ("cpu", 1), "2 ranks": ("cpu", 2), "4 ranks": ("cpu", 4)}
WORLDS |= {f"{n} GPU": ("cuda", n) for n in (1, 2, 4) if n <= torch.cuda.device_count()}
VALIDATES = "validation, sanity check, all logging"
QUICK = ["Adam", "accumulation of 3", "dropout", "full augmentation", "the default recipe, narrow"]
QUICK += [VALIDATES, "all, interrupted inside an epoch"]


def in_every_world(test: Any) -> Any:
    """On any number of ranks, and on a GPU where there is one; the test's launch is shared."""
    worlds = [pytest.param(w, marks=unless(w == "2 ranks")) for w in WORLDS]
    return pytest.mark.parametrize("world", worlds, scope="module")(test)


def in_every_regime(test: Any) -> Any:
    regimes = [pytest.param(name, marks=unless(name in QUICK)) for name in REGIMES]
    return in_every_world(pytest.mark.parametrize("regime", regimes)(test))


class Pair(NamedTuple):
    """What the two programs left: each rank's trace, the network, the last checkpoint."""

    raw: list[dict[str, Any]]
    ours: list[dict[str, Any]]
    raw_net: dict[str, torch.Tensor]
    last: dict[str, Any]
    folder: Path  # ours

    @property
    def losses(self) -> list[float]:
        """Of each step by the raw program."""
        return step_losses(self.raw)


@pytest.fixture(scope="module")
def given(some_images: Path, tmp_path_factory: Any) -> Path:
    """What the raw program cannot draw itself."""
    folder, labels = tmp_path_factory.mktemp("given"), ImageFolder(some_images / "train").targets
    rows, held_out = (part.tolist() for part in stratified_split(torch.tensor(labels), 0.1, seed=0))
    augment = Augment(crop_padding=4, flip=True, cutout=8)
    tables = [augment.table(len(labels), 32, seed=0, epoch=epoch) for epoch in range(EPOCHS)]
    both = {"train": rows, "val": held_out, "tables": tables}
    torch.save(both, folder / "held_out_augment.pt")
    torch.save({**both, "tables": None}, folder / "held_out.pt")
    torch.save({"train": None, "val": [], "tables": tables}, folder / "augment.pt")
    return folder


@pytest.fixture(scope="module")
def launched(request: Any, world: str, some_images: Path, given: Path, start: Any) -> Path:
    """Both programs trained in all regimes that the chosen tests need, each in one launch."""
    folder = request.getfixturevalue("tmp_path_factory").mktemp("parity")
    raw, cases = {}, {}
    names = chosen(request.session.items, "regime", world=world)
    for name in sorted({*names, *QUICK} - {None} if None in names else names):
        places = {"RAW": raw_place(folder, name), "IMAGES": some_images, "GIVEN": given}
        words = words_of(REGIMES[name], *WORLDS[world], **places)
        raw[places["RAW"]] = words[0]  # once where regimes share it
        cases[our_place(folder, name).name] = {"words": words[1], "stops": REGIMES[name].stops}
    (folder / "words.json").write_text(json.dumps([*raw.values()]))
    device, num_ranks = WORLDS[world]
    script = str(REPOSITORY / "tests/regimes.py")
    torchrun = "torchrun", f"--nproc-per-node={num_ranks}", script, f"{folder}/words.json"
    with start(*torchrun, CUBLAS_WORKSPACE_CONFIG=":4096:8") as process:
        try:
            laws.launch(folder / "ours", laws.regimes, num_ranks, device, cases=cases)
            _, errors = process.communicate(timeout=300)
        finally:
            process.terminate()
    assert process.returncode == 0, errors
    return folder


def raw_place(folder: Path, name: str) -> Path:
    alike = [other for other in REGIMES if REGIMES[other].raw == REGIMES[name].raw]
    return folder / f"raw-{[*REGIMES].index(alike[0])}"


def our_place(folder: Path, name: str) -> Path:
    return folder / "ours" / str([*REGIMES].index(name))


@pytest.fixture
def pair(launched: Path, world: str, regime: str) -> Pair:
    raw, ours = raw_place(launched, regime), our_place(launched, regime)
    ranks = range(WORLDS[world][1])
    starts = sorted(int(path.stem.removeprefix("0-")) for path in ours.glob("trace/0-*.pt"))
    assert starts == [0, *REGIMES[regime].stops]  # it was interrupted there, and nowhere else
    return Pair(
        [torch.load(raw / f"{rank}.pt", "cpu") for rank in ranks],
        [read_trace(ours, rank) for rank in ranks],
        torch.load(raw / "net.pt", "cpu"),
        torch.load(ours / "checkpoints/last.ckpt", "cpu", weights_only=True),
        ours,
    )


# The laws


@in_every_regime
def test_weights_and_buffers_are_equal(pair):
    ours = {name.removeprefix("net."): value for name, value in pair.last["state_dict"].items()}
    print(f"raw {digest(pair.raw_net)}  ours {digest(ours)}")
    assert ours.keys() == pair.raw_net.keys()
    assert all(torch.equal(pair.raw_net[name], ours[name]) for name in ours)


@in_every_regime
def test_the_optimizer_is_equal(pair):
    raw, ours = pair.raw[0]["optimizer"], pair.last["optimizer_states"][0]
    assert raw["state"].keys() == ours["state"].keys()
    for weight, state in raw["state"].items():
        assert state.keys() == ours["state"][weight].keys()
        assert all(torch.equal(state[name], ours["state"][weight][name]) for name in state)
    assert raw["param_groups"] == ours["param_groups"]
    assert pair.raw[0]["scaler"] == pair.last.get("MixedPrecision", {})


@in_every_regime
def test_each_rank_does_the_same_at_every_step(pair):
    for raw, ours in zip(pair.raw, pair.ours, strict=True):
        assert len(ours["weights"]) >= STEPS
        for name in "losses", "rows", "rates", "weights", "buffers":
            assert ours[name] == raw[name], name


@in_every_regime
def test_all_ranks_have_the_same_weights_at_every_step(pair):
    assert all(rank["weights"] == pair.ours[0]["weights"] for rank in pair.ours)


def of_distributed_sampler(rows: Sequence[int], ranks: int, rank: int, seed: int) -> list[int]:
    """The images of a rank, epoch by epoch, as the classic recipe deals them."""
    dealt = []
    for epoch in range(EPOCHS):
        sampler = DistributedSampler(rows, ranks, rank, seed=seed, drop_last=True)  # type: ignore
        sampler.set_epoch(epoch)
        dealt += [rows[i] for i in sampler][: len(rows) // BATCH * BATCH // ranks]
    return dealt


@in_every_regime
def test_each_rank_sees_the_images_of_distributed_sampler(pair, given, regime):
    words = REGIMES[regime].raw
    rows = torch.load(given / "held_out.pt")["train"] if "held_out" in words else range(1000)
    for rank, trace in enumerate(pair.ours):
        seen = [row for batch in trace["rows"] for row in batch]
        dealt = of_distributed_sampler(rows, len(pair.ours), rank, 5 * ("--seed 5" in words))
        assert seen == dealt[: len(seen)]


@in_every_regime
def test_the_history_has_the_mean_of_the_raw_losses(pair):
    start, losses = 0, pair.losses
    for row in history(pair.folder):
        own = losses[start : int(row["step"])]
        assert float(row["train/loss"]) == pytest.approx(sum(own) / len(own), rel=1e-6)
        start = int(row["step"])
    assert start == len(losses)


@in_every_world
@pytest.mark.parametrize("regime", ["accumulation of 3"])
def test_the_logged_loss_of_a_step_is_that_of_all_ranks_and_batches(pair):
    with (pair.folder / "csv/version_0/metrics.csv").open() as file:
        logged = [float(row["step/loss"]) for row in csv.DictReader(file) if row["step/loss"]]
    assert logged == pytest.approx(pair.losses, rel=1e-6)


@in_every_world
@pytest.mark.parametrize("regime", [VALIDATES])
def test_validation_scores_what_the_raw_loop_scores(pair):
    for row, (loss, accuracy) in zip(history(pair.folder), pair.raw[0]["val"], strict=True):
        assert float(row["val/acc"]) == accuracy
        assert float(row["val/loss"]) == pytest.approx(loss, rel=1e-6)  # other batches: rounding
    assert all(share > 0 for rank in pair.ours for share in rank["val"])


@in_every_world
@pytest.mark.parametrize("regime", ["fp16-mixed, overflow"])
def test_the_overflow_has_happened(pair):
    assert pair.last["MixedPrecision"]["scale"] < 2.0**16  # where it starts


@in_every_world
def test_no_two_regimes_are_one(launched, world):
    nets = [torch.load(path) for path in launched.glob("raw-*/net.pt")]
    assert len({digest(net) for net in nets}) == len(nets) > 4


@needs_docs
def test_each_regime_that_the_page_names_exists():
    page = (REPOSITORY / "docs/ddp.md").read_text()
    named = re.findall(r"::test_\w+\[(.+?)-\d ranks?\]", page)
    assert len(named) > 5
    assert {*named} <= {*REGIMES}


def one_by_one(image: torch.Tensor, row: torch.Tensor, augment: Augment) -> torch.Tensor:
    """What torchvision makes of one uint8 image (3, 32, 32), given its row of the table."""
    array = TF.to_tensor(image.permute(1, 2, 0).numpy())
    return augmented(array, row.tolist(), augment.crop_padding, augment.cutout, MEAN, STD)


@pytest.mark.parametrize(
    "augment",
    [FULL, Augment(crop_padding=31), Augment(flip=True), Augment(cutout=7), Augment()],
    ids=str,
)
def test_a_thousand_real_images_are_augmented_as_by_torchvision(thousand_images, augment):
    table = augment.table(1000, 32, seed=0, epoch=3)
    expected = torch.stack(
        [one_by_one(i, r, augment) for i, r in zip(thousand_images, table, strict=True)]
    )
    assert torch.equal(batched(thousand_images, table, augment), expected)


@needs_docs
@pytest.mark.slow
def test_the_commands_of_the_page_come_to_the_same(command, some_images, tmp_path):
    page = (REPOSITORY / "docs/ddp.md").read_text()
    export, *lines = page.partition("prints True:\n\n")[2].partition("\n\n")[0].splitlines()
    assert export.strip() == "export OMP_NUM_THREADS=1"  # as these tests do
    images = ["data=imagefolder", f"data.root={some_images}"]  # CIFAR-10 itself may not be there
    places = {"data/cifar10": some_images, "outputs/ours": tmp_path / "ours"}
    places |= {"tests/": f"{REPOSITORY}/tests/"}
    said = ""
    for line in lines:
        words = shlex.split(line)
        for name, place in places.items():
            words = [word.replace(name, str(place)) for word in words]
        done = command(*words, *(images if "train.py" in line else []))
        assert done.returncode == 0, done.stderr
        said = done.stdout
    assert said == "True\n"
