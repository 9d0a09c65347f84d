"""Sessions on many machines, with engines such as Ray."""
