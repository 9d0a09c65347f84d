"""The parts of a request: arguments, memory, state."""
