"""The parts of a request: arguments, their places in memory, state."""
