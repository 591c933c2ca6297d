"""Tensors and the memory beneath them: storages, ranges, buffers, contents, and the pointers into them."""
