"""The control socket's protocol: packets, values, the table of calls."""
