"""`nnburst demo`: classify real images over a burst and over `multiprocessing.Pipe`."""
