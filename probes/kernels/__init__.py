"""Reads every byte of memory at its bandwidth: Triton kernels and plain torch on a card, XXH3 and numpy on a host."""
