"""A tiny LTX-Video that draws moving shapes: its data, its models, its training, and its judge."""
