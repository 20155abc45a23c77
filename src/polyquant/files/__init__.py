"""What every file format stands on: containers, checkpoints, and files replaced in one step.

From the bottom up: strict_json, info, host, container, probe, checkpoint, replace. A format is a
module of ``polyquant.formats``, and imports these and never another format.
"""
