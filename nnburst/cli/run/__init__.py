"""`nnburst run`: run a model file once, in a service process."""
