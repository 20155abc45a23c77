"""Reports: the files that a sweep leaves behind."""

from polyquant.report.pareto import Point, front, save_csv, save_plot

__all__ = ["Point", "front", "save_csv", "save_plot"]
