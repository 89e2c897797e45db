"""Going on is as good as never having stopped."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from conftest import TINY
from laws import interrupted
from project.launch import run

WORDS = [word for word in TINY if "max_steps" not in word and "_target_" not in word]
WORDS += ["model._target_=toy.Rich", "logger=none", "trainer.max_epochs=3", "data.augment.cutout=4"]

# 9 optimizer steps an epoch
CASES: dict[str, Any] = {
    "plain": {"steps": [1, 5, 9, 13, 18, 26, 27]},
    "workers": {"words": ["data.num_workers=2"], "steps": [5, 9]},
    "accumulation": {
        "words": ["trainer.accumulate_grad_batches=2", "optimizer=adam", "scheduler=cosine"],
        "steps": [5, 9, 14],
    },
    "validation inside": {"words": ["+trainer.val_check_interval=4"], "steps": [3, 4, 5, 9, 13]},
    "validation each step": {"words": ["+trainer.val_check_interval=1"], "steps": [4]},
    "validation every other epoch": {
        "words": ["+trainer.check_val_every_n_epoch=2"],
        "steps": [5, 18],
    },
    "no validation": {"words": ["data.val_fraction=0"], "steps": [5, 10]},
    "cut by max_steps": {"words": ["trainer.max_steps=13"], "steps": [5, 9, 12, 13]},
    "max_steps at an epoch's end": {"words": ["trainer.max_steps=18"], "steps": [9, 12, 18]},
    "short epochs": {"words": ["trainer.limit_train_batches=4"], "steps": [3, 4, 6]},
    "early stop": {
        "words": [
            "callbacks=early_stopping",
            "callbacks.early_stopping.patience=1",
            "+callbacks.early_stopping.min_delta=1",
            "trainer.max_epochs=5",
        ],
        "steps": [5, 9, 12],
    },
    "top 3": {"words": ["checkpoint.top_k=3"], "steps": [5, 9, 20]},
}


def run_laws(folder: Path, train, num_ranks: int, **config: Any) -> dict[str, Any]:
    """Runs a Train of laws.py on so many ranks; returns its results."""
    (folder / ".hydra").mkdir(parents=True)
    names = "fit test compile ckpt_path weights trusted label_smoothing seed".split()
    config |= dict(zip(names, [True, False, False, None, None, [], 0, 0], strict=True))
    config["launch"] = {"inplace": num_ranks == 1, "timeout": 60, "max_restarts": 0}
    config["checkpoint"] = {"every_n_steps": None, "every_minutes": None, "top_k": 1}
    config["trainer"] = {"accelerator": "cpu", "devices": num_ranks, "num_nodes": 1}
    OmegaConf.save(OmegaConf.create(config), folder / ".hydra" / "config.yaml")
    return run(folder, train)


def test_stopped_anywhere_and_taken_up_one_rank_ends_in_the_same_bits(
    tmp_path, working_folder, monkeypatch
):
    monkeypatch.chdir(working_folder)
    cases = {name: {"words": [], **case} for name, case in CASES.items()}
    found = run_laws(tmp_path, interrupted, 1, cases=cases, words=[*WORDS, "trainer.devices=1"])
    found = {name: what for name, what in found.items() if " at " in name}
    assert found == dict.fromkeys(found, [])
