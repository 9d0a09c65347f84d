"""What a request is made of: arguments, where they lie, state."""
