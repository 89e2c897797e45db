"""Ways to train, each as words for the raw program and for train.py, that must come to the same.

torchrun --nproc-per-node=2 tests/regimes.py WORDS.json

trains by the raw program for each value of WORDS.json, all in one set of processes, since starting
those takes longer than the trainings.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import reference_ddp

BATCH, STEPS, EPOCHS = 96, 14, 2  # 1,000 images are 10 steps an epoch and 40 images left


class Regime(NamedTuple):
    """Two command lines; what all regimes have in common is in `words_of`.

    Args:
        stops: steps after which ours is stopped by a signal and taken up again.
    """

    raw: str
    ours: str
    stops: tuple[int, ...] = ()


RICH_RAW = '--net toy.Rich --net-args {"width":4} --reseed'
RICH = "model._target_=toy.Rich ~model.widths +model.width=4"
AUGMENT_RAW = "--padding 4 --cutout 8 --given GIVEN/augment.pt"
AUGMENT = "data.augment.crop_padding=4 data.augment.flip=true data.augment.cutout=8"
VALIDATE_RAW = f"{RICH_RAW} --given GIVEN/held_out.pt --validate --max-steps 18"  # 9 an epoch
VALIDATE = f"{RICH} data.val_fraction=0.1 trainer.max_steps=18 data.eval_batch_size=20"
ALL_RAW = f"""{RICH_RAW} {AUGMENT_RAW} --optimizer adamw --weight-decay 0.05 --clip 0.5
    --schedule cosine --warmup 0.1 --accumulate 3 --label-smoothing 0.1"""
ALL = f"""{RICH} {AUGMENT} optimizer=adamw trainer.gradient_clip_val=0.5 scheduler=cosine
    trainer.accumulate_grad_batches=3 label_smoothing=0.1"""

DEFAULT_RAW = """--net project.model.SpeedNet --net-args {} --initialise
    --optimizer sgd --lr 0.5 --weight-decay 5e-4 --schedule linear --warmup 0.1
    --label-smoothing 0.1 --padding 4 --given GIVEN/held_out_augment.pt --validate"""
DEFAULT = """model=speednet model.widths=[64,256,256] optimizer=sgd scheduler=linear
    data.augment.crop_padding=4 data.augment.flip=true data.val_fraction=0.1 label_smoothing=0.1"""

REGIMES = {
    "Adam": Regime("", ""),
    "ranks that begin apart": Regime(
        "--lr 0.003", "optimizer.lr=0.003 +callbacks.apart._target_=step_trace.Apart"
    ),
    "Adam, parameter groups": Regime("--weight-decay 0.01", "+optimizer.weight_decay=0.01"),
    "AdamW": Regime(
        "--optimizer adamw --lr 0.002",
        "optimizer=adamw optimizer.lr=0.002 optimizer.weight_decay=0",
    ),
    "AdamW, parameter groups": Regime("--optimizer adamw --weight-decay 0.05", "optimizer=adamw"),
    "SGD, Nesterov": Regime(
        "--optimizer sgd --lr 0.05", "optimizer=sgd optimizer.lr=0.05 optimizer.weight_decay=0"
    ),
    "SGD, Nesterov, parameter groups": Regime(
        "--optimizer sgd --lr 0.05 --weight-decay 5e-4", "optimizer=sgd optimizer.lr=0.05"
    ),
    "accumulation of 3": Regime(
        "--accumulate 3 --schedule linear --warmup 0.1",
        "trainer.accumulate_grad_batches=3 scheduler=linear logger=csv trainer.log_every_n_steps=1",
    ),
    "clipping": Regime("--clip 0.1", "trainer.gradient_clip_val=0.1"),
    "warm-up, linear decay": Regime("--schedule linear --warmup 0.1", "scheduler=linear"),
    "warm-up, cosine decay": Regime("--schedule cosine --warmup 0.1", "scheduler=cosine"),
    "bf16-mixed": Regime(
        '--precision bf16-mixed --net toy.Twice --net-args {"width":64}',
        "trainer.precision=bf16-mixed model._target_=toy.Twice ~model.widths +model.width=64",
    ),
    "fp16-mixed, overflow": Regime(
        '--precision 16-mixed --clip 1 --net toy.Loud --net-args {"width":4}',
        """trainer.precision=HALF +callbacks.half._target_=step_trace.HalfOnCPU
            trainer.gradient_clip_val=1 model._target_=toy.Loud ~model.widths +model.width=4""",
    ),
    "float64": Regime("--precision 64", "trainer.precision=64-true"),
    "label smoothing": Regime("--label-smoothing 0.1", "label_smoothing=0.1"),
    "dropout": Regime(RICH_RAW, RICH),
    "another seed": Regime(f"{RICH_RAW} --seed 5", f"{RICH} seed=5"),
    "full augmentation": Regime(AUGMENT_RAW, AUGMENT),
    "loader workers": Regime(AUGMENT_RAW, f"{AUGMENT} data.num_workers=2"),
    "images on the device": Regime(AUGMENT_RAW, f"{AUGMENT} data.on_device=true"),
    "validation, sanity check, all logging": Regime(
        VALIDATE_RAW,
        f"""{VALIDATE} +trainer.val_check_interval=3 trainer.num_sanity_val_steps=2
            logger=[tensorboard,csv] trainer.log_every_n_steps=1 checkpoint.every_n_steps=4""",
    ),
    "no validation, no logging": Regime(
        VALIDATE_RAW,
        f"{VALIDATE} trainer.limit_val_batches=0 trainer.log_every_n_steps=1000",
    ),
    "the default recipe": Regime(DEFAULT_RAW, DEFAULT),  # of several buckets
    "the default recipe, narrow": Regime(
        DEFAULT_RAW + ' --net-args {"widths":[8,16,16]}', f"{DEFAULT} model.widths=[8,16,16]"
    ),
    "the default recipe, interrupted": Regime(DEFAULT_RAW, DEFAULT, stops=(4,)),
    "compiled": Regime("--compile", "compile=true"),
    "all at once": Regime(ALL_RAW, ALL),
    "all, interrupted inside an epoch": Regime(ALL_RAW, ALL, stops=(3, 7)),
    "all, interrupted at an epoch's end": Regime(ALL_RAW, ALL, stops=(10,)),
}


def words_of(
    regime: Regime, device: str, num_ranks: int, **places: Path
) -> tuple[list[str], list[str]]:
    """The whole of both command lines.

    Args:
        device: "cpu" or "cuda".
        places: of the IMAGES, of what the raw program cannot draw itself (GIVEN) and leaves (RAW).
    """
    passes = 3 if "--accumulate 3" in regime.raw else 1
    raw = f"""--data IMAGES --device {device} --workers 0 --epochs {EPOCHS} --max-steps {STEPS}
        --batch-size {BATCH // num_ranks // passes} --net-args {{"widths":[8,16]}}
        --out RAW/net.pt --trace RAW --deterministic {regime.raw}"""
    ours = f"""experiment=tutorial trainer={"cpu" if device == "cpu" else "gpu"}
        trainer.deterministic={device != "cpu"} trainer.devices={num_ranks} model.widths=[8,16]
        data=imagefolder data.root=IMAGES data.batch_size={BATCH} logger=none test=false
        trainer.max_epochs={EPOCHS} trainer.max_steps={STEPS}
        +callbacks.trace._target_=step_trace.StepTrace {regime.ours}"""
    half = "bf16-mixed" if device == "cpu" else "16-mixed"  # see step_trace.HalfOnCPU
    return _filled(raw, places), _filled(ours, {**places, "HALF": half})


def _filled(line: str, values: dict[str, Any]) -> list[str]:
    words = line.split()
    for name, value in values.items():
        words = [word.replace(name, str(value)) for word in words]
    return words


if __name__ == "__main__":
    for words in json.loads(Path(sys.argv[1]).read_text()):
        args = reference_ddp.parse_args(words)
        Path(args.trace).mkdir(parents=True, exist_ok=True)
        reference_ddp.main(args)
    dist.destroy_process_group()
