"""Kernels for NVIDIA GPUs: Triton, and CUDA C++ compiled at run time by NVRTC.

``kernels.py`` is the table. Each other module computes one thing and is imported when it runs.
"""
