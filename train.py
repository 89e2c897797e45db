"""Train an image classifier under DDP.

python train.py                                       CIFAR-10 on one device
python train.py trainer.devices=4                     DDP on four (-1: all GPUs)
python train.py experiment=quickstart                 offline, two CPU ranks, under a minute
python train.py data=imagefolder data.root=FOLDER     your images: FOLDER/{train,test}/<class>/*
python train.py -m seed=0,1,2 optimizer.lr=0.1,0.3    a sweep
torchrun --nproc-per-node=4 train.py trainer.devices=4
"""

from pathlib import Path
from typing import Any

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from project import launch


def train(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """The whole program of one rank; all ranks run it alike."""
    import lightning  # here, since the process that launches the ranks does without

    from project.callbacks import PlainCheckpointIO, RunRecord, StepLines
    from project.task import Classifier

    data = instantiate(cfg.data, seed=cfg.seed, _convert_="all")
    data.open(test=cfg.test)  # what is missing or broken shows now, not after the training
    num_classes = data.num_classes
    lightning.seed_everything(cfg.seed, workers=True, verbose=False)  # packing has no say in it
    net = instantiate(cfg.model, num_classes=num_classes, _convert_="all")
    optimizer, scheduler = instantiate(cfg.optimizer), instantiate(cfg.scheduler)
    task = Classifier(
        net, optimizer, scheduler, num_classes, cfg.seed, cfg.label_smoothing
    )
    record = RunRecord(folder)
    callbacks = [*instantiate(cfg.callbacks).values(), StepLines(), record]
    trainer = instantiate(
        cfg.trainer,
        callbacks=callbacks,
        plugins=[PlainCheckpointIO()],
        default_root_dir=str(folder),
        use_distributed_sampler=False,  # Lightning's would deal ours out once more
        _convert_="all",
    )
    trainer.fit(task, datamodule=data)
    results = record.results(trainer)
    if cfg.test:
        trainer.test(task, datamodule=data, ckpt_path=record.chosen_path, verbose=False)
        results |= {k: v for k, v in task.metrics.items() if k.startswith("test/")}
    return results


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    """One job: every rank reads the config that Hydra wrote to the run's folder."""
    launch.run_job(train)


if __name__ == "__main__":
    launch.start(main, train)
