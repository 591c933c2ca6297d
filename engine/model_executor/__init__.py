"""The model: layers, attention, kernels, weights from a checkpoint, CUDA graphs, sampling."""
