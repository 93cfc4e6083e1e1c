"""Weight quantization as a library of its own: schemes, packing, layers. Imports nothing of minicpm_cli."""
