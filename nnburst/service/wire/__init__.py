"""What passes over the control socket: packets, values, the table of calls."""
