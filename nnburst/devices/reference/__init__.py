"""The reference device, which runs every operation in NumPy."""
