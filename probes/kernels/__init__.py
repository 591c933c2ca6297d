"""Reads every byte of device memory at its bandwidth: Triton kernels, and plain torch that gives the same values."""
