"""Processes: how services start, where they are found, how they are scheduled."""
