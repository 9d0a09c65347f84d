"""Sessions on many machines, by way of engines that do that for a living."""
