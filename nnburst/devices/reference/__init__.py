"""The reference device: every operation in NumPy, correct first."""
