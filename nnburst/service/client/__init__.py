"""The client's side: devices of another process with the interface of local ones."""
