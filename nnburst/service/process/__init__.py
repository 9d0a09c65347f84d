"""The processes of services: start, discovery, scheduling."""
