"""`nnburst bench`: compare bursts with the limit of the hardware; with ``--model``, compare ways to run a model."""
