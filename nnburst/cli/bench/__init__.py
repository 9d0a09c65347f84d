"""`nnburst bench`: compare calls with the round trip of a cache line; with ``--model``, compare ways to run a model."""
