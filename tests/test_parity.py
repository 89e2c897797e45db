"""The Trainer's run is the raw DDP loop's, bit for bit."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import REPOSITORY, environment
from project.model import CNN

STEPS = 20  # 1,000 images are 15 steps an epoch on one rank, 7 on two, 3 on four


def digest(state: dict[str, torch.Tensor]) -> str:
    """A fingerprint of names and bits."""
    parts = [name.encode() + state[name].numpy().tobytes() for name in sorted(state)]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


RANKS = [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4))]


@pytest.fixture(scope="module", params=RANKS, ids="{} ranks".format)
def pair(request: Any, some_images: Path, tmp_path_factory: Any) -> tuple[dict, dict]:
    """The same training twice, raw and by train.py, each in processes of its own."""
    ranks, out = request.param, tmp_path_factory.mktemp("parity")
    raw = f"""-m torch.distributed.run --nproc-per-node={ranks} tests/reference_ddp.py
        --data {some_images} --epochs 10 --max-steps {STEPS} --out {out}/raw.pt
        --trace {out}/trace.pt"""
    ours = f"""train.py experiment=tutorial trainer=cpu trainer.devices={ranks}
        data=imagefolder data.root={some_images} data.batch_size={64 * ranks}
        trainer.max_steps={STEPS} test=false hydra.run.dir={out}/run
        +callbacks.trace._target_=step_trace.StepTrace +callbacks.trace.folder={out}"""
    started = [
        subprocess.Popen([sys.executable, *line.split()], cwd=REPOSITORY, env=environment())
        for line in (raw, ours)
    ]
    assert [process.wait(timeout=100) for process in started] == [0, 0]
    trace = torch.load(out / "trace.pt")
    last = torch.load(out / "run/checkpoints/last.ckpt", weights_only=True)
    expected = {"network": torch.load(out / "raw.pt"), **trace}
    network = {name.removeprefix("net."): v for name, v in last["state_dict"].items()}
    losses = [torch.load(out / f"losses-{rank}.pt") for rank in range(ranks)]
    return expected, {
        "network": network,
        "losses": losses,
        "optimizer": last["optimizer_states"][0],
    }


def test_weights_and_buffers_are_equal(pair):
    raw, ours = pair
    print(f"raw {digest(raw['network'])}  ours {digest(ours['network'])}")
    assert raw["network"].keys() == ours["network"].keys()
    assert all(torch.equal(raw["network"][name], ours["network"][name]) for name in raw["network"])
    assert digest(raw["network"]) == digest(ours["network"])


def test_weights_and_buffers_have_moved(pair):
    _, ours = pair
    torch.manual_seed(0)
    start = CNN(num_classes=10).state_dict()
    assert all(not torch.equal(start[name], ours["network"][name]) for name in start)


def test_losses_of_each_rank_at_each_step_are_equal(pair):
    raw, ours = pair
    assert [len(losses) for losses in ours["losses"]] == [STEPS] * len(raw["losses"])
    assert ours["losses"] == raw["losses"]


def test_adam_state_is_equal(pair):
    raw, ours = (side["optimizer"]["state"] for side in pair)
    assert raw.keys() == ours.keys()
    for parameter, state in raw.items():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state[name], ours[parameter][name]) for name in state)
