"""`nnburst demo`: the main job on real input, side by side with `multiprocessing.Pipe`."""
