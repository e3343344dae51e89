"""One proof for every fused path: its error against float64 is compared with that of the stock path."""
