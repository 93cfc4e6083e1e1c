"""Linear layers, one small class a packing; quant.linear chooses among them."""
