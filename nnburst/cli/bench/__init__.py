"""`nnburst bench`: compare latencies with the limit of the hardware, or several ways to run a model."""
