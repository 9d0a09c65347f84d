"""Interfaces of other packages, for models in processes of their own."""
