"""Interfaces of other packages, for models that run in a service process."""
