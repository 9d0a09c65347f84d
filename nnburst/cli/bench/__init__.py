"""`nnburst bench`: compare round trips with the limit of the hardware, or several ways to run a model."""
