"""`nnburst bench`: round trips of this package and of its peers, side by side in one run (docs/benchmarks.md)."""
