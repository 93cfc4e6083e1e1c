"""File formats of quantized weights: tensors as the ecosystem stores them, to and from this library's packings."""
