"""In which form a layer holds tokens, and how attention reads them."""
