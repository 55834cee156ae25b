"""Qualifies a machine, or many, before anything is trained on them: `python -m mnist_ddp.check`."""
