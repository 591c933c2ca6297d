"""Findings: what is reported of tensors, pools, threads, files and settings, and the remedies that are tried.

One cause is one finding (`causes`); `remedies` measures what a change gives back.
"""
