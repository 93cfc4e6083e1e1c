"""GPU products: their device layout, and the kernels, compiled where a CUDA device is and nowhere else."""
