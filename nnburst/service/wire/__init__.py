"""The traffic of the control socket: packets, values, the table of calls."""
