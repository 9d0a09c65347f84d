"""The protocol of the control socket."""
