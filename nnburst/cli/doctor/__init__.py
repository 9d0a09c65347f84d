"""`nnburst doctor`: check whether this machine suits bursts, and recommend remedies."""
