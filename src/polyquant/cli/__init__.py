"""The command ``polyquant``: one file per group of commands, one table that names them all."""

from polyquant.cli.app import app, main

__all__ = ["app", "main"]
