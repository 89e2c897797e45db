"""What the fork server imports once, so that every rank starts with it.

Without garbage collection, which takes a third of the time of these imports, and frozen
afterwards, so that no collection touches (and thereby copies) the pages that ranks share.
"""

import atexit
import gc

gc.disable()
from project import signals  # noqa: E402

# A signal to all processes of a job is for the ranks to answer; without their server they would
# count as dead before they have saved.
signals.left_to_children()

import hydra.utils  # noqa: E402, F401
import torchvision  # noqa: E402, F401

import project.callbacks  # noqa: E402
import project.rank  # noqa: E402, F401

gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)  # else triton 3.9 reports what is frozen as leaked
