"""The benchmark of record: every row, the budget of the design, the figure and the tables of docs/benchmarks.md."""
