"""`nnburst bench`: round trips of this package beside what the hardware allows, or ways to run a model, in turns."""
