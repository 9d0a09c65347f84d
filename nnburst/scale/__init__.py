"""Sessions on many machines, through engines such as Ray that place and scale processes."""
