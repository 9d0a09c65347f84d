"""Processes of services: start, discovery, scheduling."""
