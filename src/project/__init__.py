"""Image classifiers that train under DDP; start with train.py."""
