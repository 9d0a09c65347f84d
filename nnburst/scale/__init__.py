"""Sessions on many machines, with engines such as Ray that place and scale processes."""
