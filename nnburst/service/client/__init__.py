"""The client's side: devices in another process, with the interface of local devices."""
